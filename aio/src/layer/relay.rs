//! A thread that hands results on, not before they are due.
//!
//! Used where a layer must hold a completion back. It takes results in the order they were handed in, so a held one
//! holds back those behind it, whatever their urgency: what it delays has been moved already, and a delay is a fault that
//! may strike anybody.

use crate::{Completer, Ticket};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Instant;

/// Results on their way; dropping it hands on all of them, no longer waiting for their time.
#[derive(Debug)]
pub(super) struct Relay {
    inbox: Option<SyncSender<Parcel>>,
    /// Disconnects when the relay is dropped, which ends every wait.
    hurry: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Parcel {
    ticket: Ticket,
    completer: Completer,
    due: Instant,
}

impl Relay {
    /// Starts the thread; `parcels_max` results wait before [`forward`](Self::forward) blocks.
    ///
    /// # Panics
    /// If the operating system has no thread left.
    pub fn new(name: &str, parcels_max: usize) -> Self {
        let (inbox, parcels) = mpsc::sync_channel::<Parcel>(parcels_max);
        let (hurry, hurried) = mpsc::sync_channel::<()>(0);
        let run = move || {
            for Parcel { ticket, completer, due } in parcels {
                let result = ticket.wait();
                let left = due.saturating_duration_since(Instant::now());
                match hurried.recv_timeout(left) {
                    Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
                }
                completer.complete(result);
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .expect("a process that simulates disks may start one more thread");
        Self { inbox: Some(inbox), hurry: Some(hurry), thread: Some(thread) }
    }

    /// A ticket that resolves as `ticket` does, but not before `due`.
    pub fn forward(&self, ticket: Ticket, due: Instant) -> Ticket {
        let (held, completer) = Ticket::new();
        if let Some(inbox) = &self.inbox {
            // If the thread is gone the parcel is dropped, and the ticket reads `Closed`.
            let _ = inbox.send(Parcel { ticket, completer, due });
        }
        held
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.hurry = None;
        self.inbox = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has closed its tickets.
            crate::engine::join(thread);
        }
    }
}
