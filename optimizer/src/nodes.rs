//! Threads work first on what their own memory node has.
//!
//! On a machine with several nodes (sockets) every node's memory has bandwidth of its own, and a core reaches that of its own node
//! sooner. What is updated stays where it is, so pieces of it are handed to threads by where they are; a thread whose node has
//! nothing left helps the others, so that nobody waits for a node with more. Threads may move between cores: where they are is
//! asked when they begin, and `--pin-threads` keeps them there.

use std::sync::{Mutex, PoisonError};

/// Does `work` on every piece, each once, on the threads of `pool`. `node_of` says where a piece is, `here` where the calling
/// thread is; pieces of a node are begun in their order.
///
/// # Errors
/// The first one of a thread that had any; such a thread does no more.
pub(crate) fn share_out<T: Send, E: Send>(
    pool: &rayon::ThreadPool,
    pieces: Vec<T>,
    node_of: impl Fn(&T) -> Option<u32>,
    here: impl Fn() -> Option<u32> + Sync,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let mut queues: Vec<(Option<u32>, Vec<T>)> = Vec::new();
    for piece in pieces.into_iter().rev() {
        let node = node_of(&piece);
        match queues.iter_mut().find(|(of, _)| *of == node) {
            Some((_, queue)) => queue.push(piece),
            None => queues.push((node, vec![piece])),
        }
    }
    let queues: Vec<_> = queues.into_iter().map(|(node, queue)| (node, Mutex::new(queue))).collect();
    let next = |queue: &Mutex<Vec<T>>| queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let ends = pool.broadcast(|thread| {
        let node = here();
        let own = queues.iter().position(|(of, _)| *of == node).unwrap_or(thread.index());
        for turn in 0..queues.len() {
            let (_, queue) = &queues[(own + turn) % queues.len()];
            while let Some(piece) = next(queue) {
                work(piece)?;
            }
        }
        Ok(())
    });
    ends.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    /// The pieces in the order in which they were done, by threads that are all on `here`.
    fn done(threads: usize, pieces: u32, here: Option<u32>, node_of: fn(&u32) -> Option<u32>) -> Vec<u32> {
        let done = Mutex::new(Vec::new());
        let work = |piece| {
            done.lock().unwrap().push(piece);
            Ok::<_, ()>(())
        };
        share_out(&pool(threads), (0..pieces).collect(), node_of, || here, work).unwrap();
        done.into_inner().unwrap()
    }

    #[test]
    fn every_piece_is_done_once() {
        for threads in [1, 2, 5] {
            for here in [None, Some(0), Some(7)] {
                for node_of in [|_: &u32| None, |piece: &u32| Some(piece % 3), |piece: &u32| Some(*piece)] {
                    for pieces in [0, 1, 40] {
                        let mut found = done(threads, pieces, here, node_of);
                        found.sort_unstable();
                        assert_eq!(found, (0..pieces).collect::<Vec<_>>());
                    }
                }
            }
        }
    }

    #[test]
    fn a_thread_begins_with_what_is_near() {
        let by_two = |piece: &u32| Some(piece % 2);
        assert_eq!(done(1, 6, Some(0), by_two), [0, 2, 4, 1, 3, 5]);
        assert_eq!(done(1, 6, Some(1), by_two), [1, 3, 5, 0, 2, 4]);
    }

    #[test]
    fn errors_are_returned() {
        let work = |piece: u32| if piece == 3 { Err(piece) } else { Ok(()) };
        assert_eq!(share_out(&pool(2), (0..6).collect(), |_| None, || None, work), Err(3));
    }
}
