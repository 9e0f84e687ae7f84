//! A device's streams on the timeline: when the link between it and the host was busy, and with what, and when the device computed.
//!
//! Nobody waits for most copies, nor for what a block computes: compute is ordered after copies on the device. So a thread looks at their events, and at nothing
//! else, while a timeline is kept. Looking changes nothing: it does not wait on a stream, and a span is off by what passes between
//! two looks. Copies of a stream go one after the other, so one begins no sooner than the one before it has ended; a copy that
//! waits for compute shows as busy from when it was asked for, and so does a block that waits for its weights.

use crate::timeline::{Resource, Timeline};
use crate::{EngineError, Result};
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use terrace_device::Event;

/// Between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// The streams of copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// Weights.
    Up,
    /// All else that goes up.
    Side,
    /// Keys and values on their way up.
    Keys,
    /// Down.
    Down,
    /// No copy: what kernels do.
    Compute,
}

/// What is copied.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cargo {
    /// A group's weights.
    Weights(usize),
    /// A part of a group's gradient.
    Gradient(usize),
    /// A part of a group's state, loaded or saved.
    State(usize),
    /// Keys and values of a block.
    Keys(usize),
    /// What a block keeps for backward.
    Kept(usize),
    /// A signal, or the gradient of one, of the block in work.
    Signal,
    /// Inputs of a micro-batch, and the loss.
    Small,
}

/// Tells a timeline of copies.
#[derive(Debug)]
pub(crate) struct Copies {
    /// Of blocks, and so of groups.
    names: Vec<String>,
    block: AtomicUsize,
    sender: Option<Sender<Told>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Told {
    Copy(Started),
    /// To answer when every copy that is done has been noted.
    Asked(Sender<()>),
}

#[derive(Debug)]
struct Started {
    link: Link,
    name: String,
    began: Instant,
    event: Arc<dyn Event>,
}

impl Copies {
    /// Starts looking, for `timeline`; `names` are those of the blocks.
    pub(crate) fn look(timeline: &Arc<Timeline>, names: Vec<String>) -> Result<Self> {
        let (sender, receiver) = unbounded();
        let timeline = Arc::clone(timeline);
        let thread = Builder::new()
            .name("terrace-copies".into())
            .spawn(move || follow(&timeline, &receiver))
            .map_err(|e| EngineError::Config(format!("cannot start the thread that looks at copies: {e}")))?;
        Ok(Self { names, block: AtomicUsize::new(0), sender: Some(sender), thread: Some(thread) })
    }

    /// Signals from here on are those of `block`.
    pub(crate) fn at(&self, block: usize) {
        self.block.store(block, Relaxed);
    }

    /// Takes note of a copy that was just asked for and is done when `event` fires.
    pub(crate) fn started(&self, link: Link, cargo: Cargo, event: &Arc<dyn Event>) {
        let name = match cargo {
            Cargo::Weights(group) => format!("weights of {}", self.names[group]),
            Cargo::Gradient(group) => format!("gradient of {}", self.names[group]),
            Cargo::State(group) => format!("state of {}", self.names[group]),
            Cargo::Keys(block) => format!("keys and values of {}", self.names[block]),
            Cargo::Kept(block) => format!("activations of {}", self.names[block]),
            Cargo::Signal => format!("signal of {}", self.names[self.block.load(Relaxed)]),
            Cargo::Small => "inputs and loss".to_owned(),
        };
        self.tell(Started { link, name, began: Instant::now(), event: Arc::clone(event) });
    }

    /// Takes note of a block's kernels, the first of which was asked for at `began`, and which are done when `event` fires.
    pub(crate) fn computed(&self, name: String, began: Instant, event: Arc<dyn Event>) {
        self.tell(Started { link: Link::Compute, name, began, event });
    }

    fn tell(&self, started: Started) {
        // The thread ends with this value, not before.
        let _ = self.sender.as_ref().map(|sender| sender.send(Told::Copy(started)));
    }

    /// Waits until the timeline has every copy that is done.
    pub(crate) fn settle(&self) {
        let (answer, answered) = unbounded();
        if self.sender.as_ref().is_some_and(|sender| sender.send(Told::Asked(answer)).is_ok()) {
            let _ = answered.recv();
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        drop(self.sender.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Copies of one stream that are not done, oldest first, and when the one before them ended.
#[derive(Debug, Default)]
struct Queue {
    started: VecDeque<Started>,
    free: Option<Instant>,
}

/// Notes copies as they end, until nobody can start any more.
fn follow(timeline: &Timeline, copies: &Receiver<Told>) {
    let mut queues: [Queue; 5] = Default::default();
    loop {
        let idle = queues.iter().all(|queue| queue.started.is_empty());
        let next = if idle {
            copies.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            copies.recv_timeout(LOOK)
        };
        let ended = matches!(next, Err(RecvTimeoutError::Disconnected));
        let asked = match next {
            Ok(Told::Copy(started)) => {
                queues[started.link as usize].started.push_back(started);
                None
            }
            Ok(Told::Asked(answer)) => Some(answer),
            Err(_) => None,
        };
        for queue in &mut queues {
            while queue.started.front().is_some_and(|copy| copy.event.is_done()) {
                let Started { link, name, began, .. } = queue.started.pop_front().expect("just looked at");
                let resource = match link {
                    Link::Up | Link::Side | Link::Keys => Resource::Upload,
                    Link::Down => Resource::Download,
                    Link::Compute => Resource::Device,
                };
                timeline.note(resource, queue.free.map_or(began, |free| began.max(free)), name);
                queue.free = Some(Instant::now());
            }
        }
        if let Some(answer) = asked {
            let _ = answer.send(());
        }
        if ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_device::host::HostDevice;
    use terrace_device::{Device, StreamKind, Upload};

    #[test]
    fn a_copy_lasts_until_its_event() {
        let device = HostDevice::discrete();
        let (arena, stream) = (device.arena(1 << 12).unwrap(), device.stream(StreamKind::Upload).unwrap());
        let compute = device.stream(StreamKind::Compute).unwrap();
        let timeline = Arc::new(Timeline::new(10));
        let copies = Copies::look(&timeline, vec!["first".into(), "second".into()]).unwrap();
        let start = |cargo| {
            let upload = Upload::start(&*stream, vec![7; 64], arena.alloc(64).unwrap()).unwrap();
            copies.started(Link::Up, cargo, upload.event());
            upload
        };
        copies.at(1);
        let uploads = [start(Cargo::Weights(0)), start(Cargo::Signal)];
        std::thread::sleep(Duration::from_millis(20));
        assert!(timeline.drain().is_empty(), "nobody waited for a copy, and looking does not");
        for upload in uploads {
            upload.ready_on(&*compute).unwrap().1.release().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        copies.settle();
        let spans = timeline.drain();
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["weights of first", "signal of second"]);
        assert!(spans.iter().all(|span| span.resource == Resource::Upload));
        assert!(spans[0].end - spans[0].start >= Duration::from_millis(20), "{spans:?}");
        assert!(spans[1].start >= spans[0].end, "one after the other: {spans:?}");
    }
}
