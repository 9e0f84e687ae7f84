//! The optimizer alone on a slice: fits y = 3x − 2 with bf16 weights and twelve bytes of state per parameter.
//!
//! ```text
//! cargo run -p terrace-optimizer --example adamw_on_a_slice
//! ```

use half::bf16;
use terrace_optimizer::{
    AdamW, Gradient, Schedule, ScheduleKind, StateFormat, StateLayout, StepArgs, SumOfSquares, WeightType,
    adamw, clip_coefficient,
};

const STEPS: u64 = 500;

fn main() -> terrace_optimizer::Result<()> {
    let layout = StateLayout::new(StateFormat::Split, WeightType::Bf16)?;
    println!("{} bytes per parameter: {:?}", layout.bytes_for(1), layout.kinds());
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let optimizer = adamw(config, layout);
    let schedule = Schedule {
        kind: ScheduleKind::Cosine,
        warmup_steps: 20,
        total_steps: STEPS,
        base_lr: 0.05,
        min_ratio: 0.0,
    };

    let (mut weight, mut low) = ([bf16::ZERO; 2], [0i16; 2]);
    let (mut m, mut v) = ([0f32; 2], [0f32; 2]);
    for step in 1..=STEPS {
        let [slope, bias] = weight.map(bf16::to_f32);
        let (loss, gradient) = loss_and_gradient(slope, bias);

        let mut squares = SumOfSquares::new();
        squares.add(Gradient::F32(&gradient));
        let grad_scale = clip_coefficient(squares.norm()?, 1.0);

        let mut state = [
            bytemuck::cast_slice_mut(&mut weight),
            bytemuck::cast_slice_mut(&mut low),
            bytemuck::cast_slice_mut(&mut m),
            bytemuck::cast_slice_mut(&mut v),
        ];
        let args = StepArgs { grad_scale, ..config.step(step, schedule.lr(step - 1)) };
        optimizer.update(&args, Gradient::F32(&gradient), &mut state)?;
        if step % 100 == 0 {
            println!("step {step}: loss {loss:.6}, y = {slope:.3} x + {bias:.3}");
        }
    }
    Ok(())
}

/// Mean squared error of `slope·x + bias` against `3x − 2` on a few points, and its gradient.
fn loss_and_gradient(slope: f32, bias: f32) -> (f32, [f32; 2]) {
    let points = [-1.0f32, -0.5, 0.0, 0.5, 1.0];
    let mut loss = 0.0;
    let mut gradient = [0.0; 2];
    for x in points {
        let error = slope * x + bias - (3.0 * x - 2.0);
        loss += error * error / points.len() as f32;
        gradient[0] += 2.0 * error * x / points.len() as f32;
        gradient[1] += 2.0 * error / points.len() as f32;
    }
    (loss, gradient)
}
