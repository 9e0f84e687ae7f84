//! Projections of the same input that the files of some families hold as one tensor.
//!
//! The blocks have a parameter for each. Linear layers are stored `[outputs, inputs]`, so that the rows of a fused tensor are those of its parts
//! one after the other: reading one is an offset, and writing one after the other is fusing them.

use terrace_zero::ParamSpec;

/// A fused layer and its parts, in the order of their rows.
const FUSED: [(&str, &[&str]); 2] = [
    (".self_attn.qkv_proj.", &[".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."]),
    (".mlp.gate_up_proj.", &[".mlp.gate_proj.", ".mlp.up_proj."]),
];

/// A tensor as files hold it: one parameter, or several one after the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) dims: Vec<usize>,
    /// In the order of their bytes.
    pub(crate) parts: Vec<ParamSpec>,
}

impl FileTensor {
    pub(crate) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub(crate) fn is_fused(&self) -> bool {
        self.parts.len() > 1
    }
}

/// The tensors that files hold `params` as; each as itself, unless the family fuses.
pub(crate) fn file_tensors<'a>(
    params: impl IntoIterator<Item = &'a ParamSpec>,
    is_fused: bool,
) -> Vec<FileTensor> {
    let mut tensors: Vec<FileTensor> = Vec::new();
    for param in params {
        let fused = if is_fused { fused_name(&param.name) } else { None };
        match tensors.last_mut() {
            Some(last) if fused.as_ref() == Some(&last.name) => {
                last.dims[0] += param.dims[0];
                last.parts.push(param.clone());
            }
            _ => tensors.push(FileTensor {
                name: fused.unwrap_or_else(|| param.name.clone()),
                dims: param.dims.clone(),
                parts: vec![param.clone()],
            }),
        }
    }
    tensors
}

fn fused_name(name: &str) -> Option<String> {
    FUSED.iter().find_map(|(fused, parts)| {
        let part = parts.iter().find(|part| name.contains(**part))?;
        Some(name.replacen(part, fused, 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_one_another() {
        let spec =
            |name: &str, rows: usize| ParamSpec::new(format!("model.layers.3.{name}.weight"), &[rows, 8]);
        let params = [
            spec("self_attn.q_proj", 16),
            spec("self_attn.k_proj", 4),
            spec("self_attn.v_proj", 4),
            spec("self_attn.o_proj", 8),
            spec("mlp.gate_proj", 12),
            spec("mlp.up_proj", 12),
        ];
        let of = |is_fused| {
            let tensors = file_tensors(&params, is_fused);
            tensors.into_iter().map(|t| (t.name, t.dims[0], t.parts.len())).collect::<Vec<_>>()
        };
        let name = |name: &str| format!("model.layers.3.{name}.weight");
        let expected =
            [("self_attn.qkv_proj", 24, 3), ("self_attn.o_proj", 8, 1), ("mlp.gate_up_proj", 24, 2)];
        assert_eq!(of(true), expected.map(|(n, rows, parts)| (name(n), rows, parts)));
        assert_eq!(of(false).len(), params.len());
    }
}
