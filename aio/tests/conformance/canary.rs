//! Engines broken on purpose. If the suite lets one of them pass, the suite is broken.

use crate::rig::{Rig, failures};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_aio::{Completer, FileId, IoBuf, IoEngine, OpKind, Request, Ticket, Urgency};

/// What is wrong with an engine.
#[derive(Debug, Clone, Copy)]
enum Flaw {
    /// None: the wrapper itself conforms.
    None,
    /// The buffer ranges of the first two segments are exchanged.
    SwapsSegments,
    /// The last byte of a long request is not moved.
    StopsShort,
    /// Writes of small ranges take the whole 512-byte sector with them.
    ClobbersNeighbours,
    /// Errors are not reported.
    SwallowsErrors,
    /// Urgent requests are like any other.
    IgnoresUrgency,
    /// Other requests beside several urgent ones are never begun.
    Starves,
}

#[derive(Debug)]
struct Broken {
    inner: SimEngine,
    flaw: Flaw,
    /// Urgent requests that are not done.
    urgent: Arc<AtomicUsize>,
    starved: Mutex<Vec<Completer>>,
}

impl IoEngine for Broken {
    terrace_aio::pass_files_on!(inner);

    fn submit(&self, mut request: Request) -> Ticket {
        let len = request.buf.len();
        match self.flaw {
            Flaw::None => {}
            Flaw::SwapsSegments => {
                if let [first, second, ..] = &mut request.segments[..]
                    && first.len == second.len
                {
                    std::mem::swap(&mut first.start, &mut second.start);
                } else if let [first, second, ..] = &mut request.segments[..] {
                    std::mem::swap(&mut first.file, &mut second.file);
                }
            }
            Flaw::StopsShort => {
                if let Some(last) = request.segments.last_mut().filter(|s| s.len > 60_000) {
                    last.len -= 1;
                }
            }
            Flaw::ClobbersNeighbours => {
                if request.kind == OpKind::Write && len < 512 && request.segments.len() == 1 {
                    let offset = request.segments[0].offset / 512 * 512;
                    let file_len = self.inner.len(request.segments[0].file).unwrap_or(0);
                    let sector = file_len.saturating_sub(offset).min(512) as usize;
                    drop(self.inner.submit(Request::write(
                        request.segments[0].file,
                        offset,
                        IoBuf::zeroed(sector),
                    )));
                }
            }
            Flaw::SwallowsErrors => {
                return match self.inner.submit(request).wait() {
                    Ok(buf) => Ticket::ready(Ok(buf)),
                    Err(_) => Ticket::ready(Ok(IoBuf::zeroed(len))),
                };
            }
            Flaw::IgnoresUrgency => request.urgency = Urgency::Whenever,
            Flaw::Starves if request.urgency == Urgency::Soon => {
                self.urgent.fetch_add(1, Ordering::SeqCst);
                let urgent = Arc::clone(&self.urgent);
                return self.inner.submit(request).observed(move |_| {
                    urgent.fetch_sub(1, Ordering::SeqCst);
                });
            }
            Flaw::Starves if self.urgent.load(Ordering::SeqCst) > 1 => {
                let (ticket, completer) = Ticket::new();
                self.starved.lock().unwrap().push(completer);
                return ticket;
            }
            Flaw::Starves => {}
        }
        self.inner.submit(request)
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.inner.sync(file)
    }
}

fn failures_of(flaw: Flaw) -> Vec<&'static str> {
    // Without delays, so that only the flaw can be the cause.
    let config =
        SimConfig { short_one_in: 0, interrupt_one_in: 0, delay_ticks_max: 0, ..SimConfig::default() };
    failures(|| {
        let inner = SimEngine::new(config.clone());
        Rig::in_memory(Arc::new(Broken { inner, flaw, urgent: Arc::default(), starved: Mutex::default() }))
    })
}

#[test]
fn the_wrapper_itself_conforms() {
    assert_eq!(failures_of(Flaw::None), [""; 0]);
}

#[test]
fn swapped_segments_are_found() {
    assert!(failures_of(Flaw::SwapsSegments).contains(&"segments_over_several_files"));
}

#[test]
fn short_transfers_are_found() {
    assert!(failures_of(Flaw::StopsShort).contains(&"odd_sizes_and_offsets"));
}

#[test]
fn clobbered_neighbours_are_found() {
    assert!(failures_of(Flaw::ClobbersNeighbours).contains(&"adjacent_small_writes_keep_their_neighbours"));
}

#[test]
fn swallowed_errors_are_found() {
    assert!(failures_of(Flaw::SwallowsErrors).contains(&"reading_past_the_end_names_the_range"));
}

#[test]
fn ignored_urgency_is_found() {
    assert_eq!(failures_of(Flaw::IgnoresUrgency), ["urgent_requests_go_ahead_of_what_waits"]);
}

#[test]
fn starving_is_found() {
    let case = "others_have_turns_beside_a_stream_of_urgent_requests";
    assert_eq!(failures_of(Flaw::Starves), [case]);
}
