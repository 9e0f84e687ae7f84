//! Parameters that the files of some families hold as one tensor.
//!
//! The blocks have a parameter for each. Linear layers are stored `[outputs, inputs]`, so that the rows of a tensor of projections are those of
//! its parts one after the other: reading one is an offset, and writing one after the other is fusing them. Queries and their gates take turns,
//! head by head. A tensor of the experts of gpt-oss has them the other way round, `[inputs, outputs]`, and where it holds two layers of each, an
//! output of one after an output of the other.

use std::collections::HashMap;
use terrace_zero::ParamSpec;

/// What files hold together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Nothing.
    Apart,
    /// Projections of the same input.
    Projections,
    /// The experts of a layer, as gpt-oss has them.
    Experts,
    /// The experts of a layer, one after the other.
    ExpertsInOrder,
    /// Queries and their gates.
    Gates,
    /// The same, and the experts of a layer, one after the other.
    GatesAndExperts,
}

/// How the parts of a tensor lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Part after part.
    Following,
    /// So many of the parts follow one another output by output, `[E, inputs, layers · outputs]`.
    Woven { layers: usize },
    /// All parts take turns, with so many rows each.
    Turns { rows: usize },
}

/// A fused layer and its parts, in the order of their rows.
const PROJECTIONS: [(&str, &[&str]); 2] = [
    (".self_attn.qkv_proj.", &[".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."]),
    (".mlp.gate_up_proj.", &[".mlp.gate_proj.", ".mlp.up_proj."]),
];

/// A tensor of experts and the layers of each in it.
const OF_EXPERTS: [(&str, &[&str]); 2] =
    [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// Queries with their gates, and both, head by head.
const GATED: (&str, [&str; 2]) = (".self_attn.q_proj.", [".self_attn.q_proj.", ".self_attn.q_gate_proj."]);

/// What precedes the number of an expert.
const EXPERTS: &str = ".experts.";

/// A tensor as files hold it: one parameter, or several.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) dims: Vec<usize>,
    /// In the order of their bytes, or of experts and their layers.
    pub(crate) parts: Vec<ParamSpec>,
    pub(crate) order: Order,
}

impl FileTensor {
    fn of(name: String, part: &ParamSpec, order: Order) -> Self {
        Self { name, dims: part.dims.clone(), parts: vec![part.clone()], order }
    }

    pub(crate) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub(crate) fn is_fused(&self) -> bool {
        self.parts.len() > 1 || self.is_woven()
    }

    pub(crate) fn is_woven(&self) -> bool {
        matches!(self.order, Order::Woven { .. })
    }
}

/// The tensors that files hold `params` as; each as itself, unless the family packs. Gates have heads of `head_size`.
pub(crate) fn file_tensors<'a>(
    params: impl IntoIterator<Item = &'a ParamSpec>,
    packing: Packing,
    head_size: usize,
) -> Vec<FileTensor> {
    match packing {
        Packing::Apart => params
            .into_iter()
            .map(|param| FileTensor::of(param.name.clone(), param, Order::Following))
            .collect(),
        Packing::Projections => of_projections(params),
        Packing::Experts => of_experts(params, true),
        Packing::ExpertsInOrder => of_experts(params, false),
        Packing::Gates => with_gates(params, head_size),
        Packing::GatesAndExperts => {
            let (of_layers, others): (Vec<_>, Vec<_>) =
                params.into_iter().partition(|param| name_of_experts(&param.name).is_some());
            let mut all = with_gates(others, head_size);
            all.extend(of_experts(of_layers, false));
            all
        }
    }
}

/// Parts follow one another in lists of parameters.
fn with_gates<'a>(params: impl IntoIterator<Item = &'a ParamSpec>, head_size: usize) -> Vec<FileTensor> {
    let (fused, [_, gate]) = GATED;
    let mut tensors: Vec<FileTensor> = Vec::new();
    for param in params {
        let with = param.name.contains(gate).then(|| param.name.replacen(gate, fused, 1));
        let queries = with.and_then(|name| tensors.iter_mut().rfind(|tensor| tensor.name == name));
        match queries {
            Some(queries) => {
                queries.dims[0] += param.dims[0];
                queries.parts.push(param.clone());
                queries.order = Order::Turns { rows: head_size };
            }
            None => tensors.push(FileTensor::of(param.name.clone(), param, Order::Following)),
        }
    }
    tensors
}

fn of_projections<'a>(params: impl IntoIterator<Item = &'a ParamSpec>) -> Vec<FileTensor> {
    let fused_name = |name: &str| {
        PROJECTIONS.iter().find_map(|(fused, parts)| {
            let part = parts.iter().find(|part| name.contains(**part))?;
            Some(name.replacen(part, fused, 1))
        })
    };
    let mut tensors: Vec<FileTensor> = Vec::new();
    for param in params {
        let fused = fused_name(&param.name);
        match tensors.last_mut() {
            Some(last) if fused.as_ref() == Some(&last.name) => {
                last.dims[0] += param.dims[0];
                last.parts.push(param.clone());
            }
            _ => {
                let name = fused.unwrap_or_else(|| param.name.clone());
                tensors.push(FileTensor::of(name, param, Order::Following));
            }
        }
    }
    tensors
}

/// Woven, or one after the other, `[E, layers · outputs, inputs]`.
fn of_experts<'a>(params: impl IntoIterator<Item = &'a ParamSpec>, are_woven: bool) -> Vec<FileTensor> {
    let mut tensors: Vec<FileTensor> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for param in params {
        let Some((name, layers)) = name_of_experts(&param.name) else {
            tensors.push(FileTensor::of(param.name.clone(), param, Order::Following));
            continue;
        };
        match places.get(&name) {
            Some(&place) => tensors[place].parts.push(param.clone()),
            None => {
                places.insert(name.clone(), tensors.len());
                tensors.push(FileTensor::of(name, param, Order::Woven { layers }));
            }
        }
    }
    for tensor in &mut tensors {
        let Order::Woven { layers } = tensor.order else { continue };
        let experts = tensor.parts.len() / layers;
        let (outputs, inputs) = (tensor.dims[0] * layers, tensor.dims.get(1).copied());
        if are_woven {
            tensor.dims = [experts].into_iter().chain(inputs).chain([outputs]).collect();
        } else {
            tensor.dims = [experts, outputs].into_iter().chain(inputs).collect();
            tensor.order = Order::Following;
        }
    }
    tensors
}

/// What files call the tensor of a layer of an expert, and how many layers of each are in it.
fn name_of_experts(name: &str) -> Option<(String, usize)> {
    let (layer, expert) = name.split_once(EXPERTS)?;
    let (_, of_expert) = expert.split_once('.')?;
    let (of_expert, kind) = of_expert.split_once('.')?;
    let (fused, layers) = OF_EXPERTS.iter().find(|(_, layers)| layers.contains(&of_expert))?;
    let kind = if kind == "weight" { String::new() } else { format!("_{kind}") };
    Some((format!("{layer}{EXPERTS}{fused}{kind}"), layers.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tensors: Vec<FileTensor>) -> Vec<(String, Vec<usize>, usize)> {
        tensors.into_iter().map(|tensor| (tensor.name, tensor.dims, tensor.parts.len())).collect()
    }

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
        let name = |name: &str| format!("model.layers.3.{name}.weight");
        let expected =
            [("self_attn.qkv_proj", 24, 3), ("self_attn.o_proj", 8, 1), ("mlp.gate_up_proj", 24, 2)];
        assert_eq!(
            names(file_tensors(&params, Packing::Projections, 4)),
            expected.map(|(n, rows, parts)| (name(n), vec![rows, 8], parts))
        );
        assert_eq!(file_tensors(&params, Packing::Apart, 4).len(), params.len());
    }

    #[test]
    fn experts_are_woven() {
        let mut params = vec![ParamSpec::new("model.layers.3.mlp.router.bias", &[2])];
        for expert in 0..2 {
            for (layer, [outputs, inputs]) in
                [("gate_proj", [12, 8]), ("up_proj", [12, 8]), ("down_proj", [8, 12])]
            {
                let name = format!("model.layers.3.mlp.experts.{expert}.{layer}");
                params.push(ParamSpec::new(format!("{name}.weight"), &[outputs, inputs]));
                params.push(ParamSpec::new(format!("{name}.bias"), &[outputs]));
            }
        }
        let tensors = file_tensors(&params, Packing::Experts, 4);
        let order: Vec<&str> = tensors[1].parts.iter().map(|part| &part.name[27..]).collect();
        assert_eq!(
            order,
            ["0.gate_proj.weight", "0.up_proj.weight", "1.gate_proj.weight", "1.up_proj.weight"]
        );
        let expected = [
            ("router.bias", vec![2], 1),
            ("experts.gate_up_proj", vec![2, 8, 24], 4),
            ("experts.gate_up_proj_bias", vec![2, 24], 4),
            ("experts.down_proj", vec![2, 12, 8], 2),
            ("experts.down_proj_bias", vec![2, 8], 2),
        ];
        assert_eq!(
            names(tensors),
            expected.map(|(name, dims, parts)| (format!("model.layers.3.mlp.{name}"), dims, parts))
        );
    }
    #[test]
    fn gates_take_turns_with_queries() {
        let spec =
            |name: &str, rows: usize| ParamSpec::new(format!("model.layers.3.{name}.weight"), &[rows, 8]);
        let mut params: Vec<ParamSpec> =
            ["q_proj", "q_gate_proj", "k_proj"].map(|name| spec(&format!("self_attn.{name}"), 12)).into();
        for expert in 0..2 {
            for (layer, rows) in [("gate_proj", 6), ("up_proj", 6), ("down_proj", 8)] {
                params.push(spec(&format!("mlp.experts.{expert}.{layer}"), rows));
            }
        }
        let tensors = file_tensors(&params, Packing::GatesAndExperts, 4);
        assert_eq!(tensors[0].order, Order::Turns { rows: 4 });
        assert!(tensors[1..].iter().all(|tensor| tensor.order == Order::Following));
        let expected = [
            ("self_attn.q_proj.weight", vec![24, 8], 2),
            ("self_attn.k_proj.weight", vec![12, 8], 1),
            ("mlp.experts.gate_up_proj", vec![2, 12, 8], 4),
            ("mlp.experts.down_proj", vec![2, 8, 8], 2),
        ];
        let expected = expected.map(|(name, dims, parts)| (format!("model.layers.3.{name}"), dims, parts));
        assert_eq!(names(tensors), expected);
    }
}
