//! Gathering is exact up to the rounding to the result's dtype; sums of up to 60 rows of order 1 in f32: 1e-5.

use crate::support::{Host, MIXES, Random, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, cpu, reference};

#[test]
fn gather_and_scatter() {
    for sizes in [(1, 1, 1), (60, 5, 300), (33, 100, 1030)] {
        MIXES.into_iter().for_each(|mix| check(sizes, mix));
    }
}

fn check((tokens, vocabulary, width): (usize, usize, usize), (dtype, out_dtype): (DType, DType)) {
    let mut random = Random::new(7);
    let ids = Host::of(DType::I32, &[tokens], (0..tokens).map(|_| random.below(vocabulary) as f64));
    let table = Host::random(dtype, &[vocabulary, width], 1.0, 1);
    let dout = Host::random(dtype, &[tokens, width], 1.0, 2);
    let old = Host::random(DType::F32, &[vocabulary, width], 1.0, 3);
    let run = |set: &terrace_kernels::KernelSet, dtype| {
        let (mut out, mut dtable) = (Host::zeros(dtype, &[tokens, width]), old.clone());
        set.embedding.gather(ids.view(), table.view(), out.view_mut()).unwrap();
        set.embedding.scatter_add(ids.view(), dout.view(), dtable.view_mut()).unwrap();
        (out, dtable)
    };
    let (expected, expected_table) = run(&reference::kernel_set(), DType::F32);
    for (name, set) in backends() {
        let (out, dtable) = run(&set, out_dtype);
        assert_close(&name, &expected, &out, 0.0);
        assert_close(&name, &expected_table, &dtable, 1e-5);
    }
}

#[test]
#[should_panic(expected = "gather: id -1 at 1 is one of 5 rows")]
fn an_id_below_the_table() {
    let (ids, table) = (Host::of(DType::I32, &[2], [4.0, -1.0]), Host::zeros(DType::F32, &[5, 3]));
    let _ = cpu::kernel_set(2).embedding.gather(
        ids.view(),
        table.view(),
        Host::zeros(DType::F32, &[2, 3]).view_mut(),
    );
}

#[test]
#[should_panic(expected = "scatter_add: id 5 at 0 is one of 5 rows")]
fn an_id_beyond_the_table() {
    let (ids, dout) = (Host::of(DType::I32, &[2], [5.0, 0.0]), Host::zeros(DType::F32, &[2, 3]));
    let _ = cpu::kernel_set(2).embedding.scatter_add(
        ids.view(),
        dout.view(),
        Host::zeros(DType::F32, &[5, 3]).view_mut(),
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        tokens in 1usize..60, vocabulary in 1usize..40, width in 1usize..1500, mix in 0..MIXES.len(),
    ) {
        check((tokens, vocabulary, width), MIXES[mix]);
    }
}
