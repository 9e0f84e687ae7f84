//! Rotary position embedding (Su et al., arXiv 2104.09864), pairs `(i, i + K/2)`.
//!
//! The angle is the f32 product of position and frequency, as Hugging Face computes it; its sine and cosine are taken
//! in f64 (whose range reduction is exact enough for any position) and rounded, once per token and pair, for all heads.
//! Tolerance against f64: 2 units in the last place of f32 of the longer of the pair, before the rounding.

use super::Cpu;
use super::floats::{CHUNK, FloatsMut, floats, ints};
use super::threads::Carver;
use super::vector;
use crate::check;
use crate::{Result, Rope, RopeDirection, View, ViewMut};

impl Rope for Cpu {
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        scale: f32,
        direction: RopeDirection,
    ) -> Result {
        let dims = check::rope(&x, positions, inv_freq);
        let (positions_t, inv_freq_i) = (ints(positions), floats(inv_freq));
        let (x, isa, half) = (FloatsMut::new(x), self.threads.isa(), dims.head_size / 2);
        let token_len = dims.heads * dims.head_size;
        if token_len == 0 {
            return Ok(());
        }
        let sign = if direction == RopeDirection::Forward { 1.0 } else { -1.0 };
        // A sine costs about as much as rotating sixteen elements.
        let task_tokens = (CHUNK / (token_len + 16 * half)).max(1);
        self.threads.run_ranges(dims.tokens, task_tokens, |tokens, scratch| {
            let mut carver = Carver::new(scratch);
            let (cos, sin, row) = (carver.take(half), carver.take(half), carver.take(dims.head_size));
            for t in tokens {
                for ((cos, sin), inv_freq) in cos.iter_mut().zip(sin.iter_mut()).zip(inv_freq_i) {
                    let angle = f64::from(positions_t[t] as f32 * inv_freq);
                    *cos = (angle.cos() * f64::from(scale)) as f32;
                    *sin = (angle.sin() * f64::from(sign * scale)) as f32;
                }
                for h in 0..dims.heads {
                    let at = t * token_len + h * dims.head_size;
                    // SAFETY: token t belongs to this task.
                    unsafe { x.read(isa, at, row) };
                    let (low, high) = row.split_at_mut(half);
                    vector::rotate(isa, low, high, cos, sin);
                    // SAFETY: as above.
                    unsafe { x.write(isa, at, row) };
                }
            }
        });
        Ok(())
    }
}
