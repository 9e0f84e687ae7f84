//! Columns of matrices, element by element.

use super::{Reference, values};
use crate::check;
use crate::{Columns, Result, View, ViewMut};

impl Columns for Reference {
    fn copy(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_copy(x, from, &out, to, width);
        let element = x.dtype().size();
        let (x, out) = (x.bytes().host(), out.into_bytes().into_host());
        for r in 0..dims.rows {
            for c in 0..width {
                let source = (r / dims.group * dims.x_width + from + c) * element;
                let target = (r * dims.out_width + to + c) * element;
                out[target..target + element].copy_from_slice(&x[source..source + element]);
            }
        }
        Ok(())
    }

    fn fold(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_fold(x, from, &out, to, width);
        let (x_ra, mut out_ra) = (values::read(x), values::read(out.view()));
        for r in 0..dims.groups() {
            for c in 0..width {
                let term = |i: usize| x_ra[(r * dims.group + i) * dims.x_width + from + c];
                out_ra[r * dims.out_width + to + c] = (1..dims.group).fold(term(0), |sum, i| sum + term(i));
            }
        }
        values::write(out, &out_ra);
        Ok(())
    }

    fn clear(&self, out: ViewMut<'_>, at: usize, width: usize) -> Result {
        let [rows, all] = check::columns_clear(&out, at, width);
        let element = out.dtype().size();
        let out = out.into_bytes().into_host();
        for r in 0..rows {
            out[(r * all + at) * element..][..width * element].fill(0);
        }
        Ok(())
    }
}
