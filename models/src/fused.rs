//! Parameters that the files of some families hold as one tensor.
//!
//! The blocks have a parameter for each. Linear layers are stored `[outputs, inputs]`, so that the rows of a tensor of projections are those of
//! its parts one after the other: reading one is an offset, and writing one after the other is fusing them. Queries and their gates take turns,
//! head by head, and so do in Qwen 3 Next what the gated delta rule is given, of which queries, keys and values are one parameter. A tensor of the experts of gpt-oss has them the other way round, `[inputs, outputs]`, and where it holds two layers of each, an
//! output of one after an output of the other; in Llama 4 the outputs of one precede those of the other.

use crate::ModelConfig;
use std::collections::HashMap;
use terrace_kernels::DeltaSpec;
use terrace_zero::ParamSpec;

/// What files hold together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Nothing.
    Apart,
    /// Projections of the same input.
    Projections,
    /// Those of the feed-forward alone.
    GateAndUp,
    /// The experts of a layer, as gpt-oss has them.
    Experts,
    /// The experts of a layer, as Llama 4 has them.
    ExpertsTurned,
    /// The experts of a layer, one after the other.
    ExpertsInOrder,
    /// Queries and their gates.
    Gates,
    /// The same, and the experts of a layer, one after the other.
    GatesAndExperts,
    /// The first, and what the gated delta rule is given, by heads of keys.
    GatesAndDelta,
}

/// How files hold the parameters of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    packing: Packing,
    /// Of queries, whose gates take turns with them.
    head_size: usize,
    /// Of layers with the gated delta rule.
    delta: Option<DeltaSpec>,
}

impl Layout {
    /// Each parameter as itself.
    pub(crate) const APART: Self = Self { packing: Packing::Apart, head_size: 1, delta: None };

    pub(crate) fn of(config: &ModelConfig) -> Self {
        Self {
            packing: config.family.packing(),
            head_size: config.head_size,
            delta: config.delta.as_ref().map(|delta| delta.spec),
        }
    }
}

/// How the parts of a tensor lie in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    /// Part after part.
    Following,
    /// So many of the parts have their outputs side by side, `[E, inputs, layers · outputs]`.
    Woven {
        layers: usize,
        /// An output of one after an output of the other; else all of one after all of the other.
        in_turns: bool,
    },
    /// These take turns, in this order, each with its next rows.
    Turns(Vec<Strip>),
}

/// Rows of a part that take turns with those of others, or with others of the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strip {
    /// Whose they are.
    pub(crate) part: usize,
    /// The first row in it, of the first turn.
    pub(crate) first: usize,
    /// How many of a turn.
    pub(crate) rows: usize,
}

/// Most strips of a part.
pub(crate) const STRIPS_MAX: usize = 3;

/// A fused layer and its parts, in the order of their rows.
type Fused = (&'static str, &'static [&'static str]);

const PROJECTIONS: [Fused; 2] = [
    (".self_attn.qkv_proj.", &[".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."]),
    (".mlp.gate_up_proj.", &[".mlp.gate_proj.", ".mlp.up_proj."]),
];

/// A tensor of experts and the layers of each in it.
const OF_EXPERTS: [(&str, &[&str]); 2] =
    [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// Queries with their gates, and what the gated delta rule is given, each with what is in it.
const GATED: (&str, [&str; 2]) = (".self_attn.q_proj.", [".self_attn.q_proj.", ".self_attn.q_gate_proj."]);
const DELTA_VALUES: (&str, [&str; 2]) =
    (".linear_attn.in_proj_qkvz.", [".linear_attn.in_proj_qkv.", ".linear_attn.in_proj_z."]);
const DELTA_GATES: (&str, [&str; 2]) =
    (".linear_attn.in_proj_ba.", [".linear_attn.in_proj_b.", ".linear_attn.in_proj_a."]);

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

/// The tensors that files hold `params` as; each as itself, unless the family packs.
pub(crate) fn file_tensors<'a>(
    params: impl IntoIterator<Item = &'a ParamSpec>,
    layout: &Layout,
) -> Vec<FileTensor> {
    let gates = || Turns::of_gates(layout.head_size);
    match layout.packing {
        Packing::Apart => params
            .into_iter()
            .map(|param| FileTensor::of(param.name.clone(), param, Order::Following))
            .collect(),
        Packing::Projections => of_projections(params, &PROJECTIONS),
        Packing::GateAndUp => of_projections(params, &PROJECTIONS[1..]),
        Packing::Experts => of_experts(params, Some(true)),
        Packing::ExpertsTurned => of_experts(params, Some(false)),
        Packing::ExpertsInOrder => of_experts(params, None),
        Packing::Gates => with_turns(params, &[gates()]),
        Packing::GatesAndExperts => {
            let (of_layers, others): (Vec<_>, Vec<_>) =
                params.into_iter().partition(|param| name_of_experts(&param.name).is_some());
            let mut all = with_turns(others, &[gates()]);
            all.extend(of_experts(of_layers, None));
            all
        }
        Packing::GatesAndDelta => {
            let of_delta = layout.delta.iter().flat_map(Turns::of_delta);
            with_turns(params, &of_delta.chain([gates()]).collect::<Vec<_>>())
        }
    }
}

/// A tensor whose parts take turns.
struct Turns {
    name: &'static str,
    parts: [&'static str; 2],
    strips: Vec<Strip>,
}

impl Turns {
    fn of_gates(head_size: usize) -> Self {
        Self::of_halves(GATED, head_size)
    }

    /// Of each key head a query, a key, values and what multiplies what comes of them; and gates.
    fn of_delta(spec: &DeltaSpec) -> [Self; 2] {
        let DeltaSpec { key_heads, key_size, value_size, .. } = *spec;
        let (values, keys) = (spec.group() * value_size, key_heads * key_size);
        let strip = |part, first, rows| Strip { part, first, rows };
        let strips = [
            strip(0, 0, key_size),
            strip(0, keys, key_size),
            strip(0, 2 * keys, values),
            strip(1, 0, values),
        ];
        let (name, parts) = DELTA_VALUES;
        [Self { name, parts, strips: strips.into() }, Self::of_halves(DELTA_GATES, spec.group())]
    }

    fn of_halves((name, parts): (&'static str, [&'static str; 2]), rows: usize) -> Self {
        Self { name, parts, strips: [0, 1].map(|part| Strip { part, first: 0, rows }).into() }
    }
}

/// The first of two parts precedes the second in lists of parameters.
fn with_turns<'a>(params: impl IntoIterator<Item = &'a ParamSpec>, all: &[Turns]) -> Vec<FileTensor> {
    let mut tensors: Vec<FileTensor> = Vec::new();
    for param in params {
        let of = all.iter().find_map(|turns| {
            let part = turns.parts.iter().position(|part| param.name.contains(part))?;
            Some((turns, param.name.replacen(turns.parts[part], turns.name, 1), part))
        });
        let Some((turns, name, part)) = of else {
            tensors.push(FileTensor::of(param.name.clone(), param, Order::Following));
            continue;
        };
        match tensors.iter_mut().rfind(|tensor| tensor.name == name) {
            Some(tensor) if part == 1 => {
                tensor.dims[0] += param.dims[0];
                tensor.parts.push(param.clone());
                tensor.order = Order::Turns(turns.strips.clone());
            }
            _ => tensors.push(FileTensor::of(name, param, Order::Following)),
        }
    }
    tensors
}

fn of_projections<'a>(
    params: impl IntoIterator<Item = &'a ParamSpec>,
    projections: &[Fused],
) -> Vec<FileTensor> {
    let fused_name = |name: &str| {
        projections.iter().find_map(|(fused, parts)| {
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

/// Woven, [in turns](Order::Woven) or not, or one after the other, `[E, layers · outputs, inputs]`.
fn of_experts<'a>(params: impl IntoIterator<Item = &'a ParamSpec>, woven: Option<bool>) -> Vec<FileTensor> {
    let in_turns = woven.unwrap_or_default();
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
                tensors.push(FileTensor::of(name, param, Order::Woven { layers, in_turns }));
            }
        }
    }
    for tensor in &mut tensors {
        let Order::Woven { layers, .. } = tensor.order else { continue };
        let experts = tensor.parts.len() / layers;
        let (outputs, inputs) = (tensor.dims[0] * layers, tensor.dims.get(1).copied());
        if woven.is_some() {
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

    /// Heads of 4 elements; 2 heads of keys of 3 elements and 6 of values of 5.
    fn layout(packing: Packing) -> Layout {
        let spec = DeltaSpec { key_heads: 2, value_heads: 6, key_size: 3, value_size: 5 };
        Layout { packing, head_size: 4, delta: Some(spec) }
    }

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
            names(file_tensors(&params, &layout(Packing::Projections))),
            expected.map(|(n, rows, parts)| (name(n), vec![rows, 8], parts))
        );
        let of_queries =
            [("self_attn.q_proj", 16, 1), ("self_attn.k_proj", 4, 1), ("self_attn.v_proj", 4, 1)];
        assert_eq!(
            names(file_tensors(&params, &layout(Packing::GateAndUp))),
            [&of_queries[..], &expected[1..]]
                .concat()
                .into_iter()
                .map(|(n, rows, parts)| (name(n), vec![rows, 8], parts))
                .collect::<Vec<_>>()
        );
        assert_eq!(file_tensors(&params, &Layout::APART).len(), params.len());
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
        let tensors = file_tensors(&params, &layout(Packing::Experts));
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
        let tensors = file_tensors(&params, &layout(Packing::GatesAndExperts));
        let strip = |part| Strip { part, first: 0, rows: 4 };
        assert_eq!(tensors[0].order, Order::Turns(vec![strip(0), strip(1)]));
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

    /// The class's words: of each key head its query, its key, the values of its group and as many of z; and b and a of its group.
    #[test]
    fn inputs_of_the_delta_rule_take_turns_by_key_heads() {
        let spec =
            |name: &str, rows: usize| ParamSpec::new(format!("model.layers.3.{name}.weight"), &[rows, 8]);
        let params = [
            ("linear_attn.in_proj_qkv", 42),
            ("linear_attn.in_proj_z", 30),
            ("linear_attn.in_proj_b", 6),
            ("linear_attn.in_proj_a", 6),
            ("linear_attn.out_proj", 8),
            ("self_attn.q_proj", 16),
            ("self_attn.q_gate_proj", 16),
            ("mlp.experts.0.gate_proj", 5),
        ]
        .map(|(name, rows)| spec(name, rows));
        let tensors = file_tensors(&params, &layout(Packing::GatesAndDelta));
        let expected = [
            ("linear_attn.in_proj_qkvz", 72, 2),
            ("linear_attn.in_proj_ba", 12, 2),
            ("linear_attn.out_proj", 8, 1),
            ("self_attn.q_proj", 32, 2),
            ("mlp.experts.0.gate_proj", 5, 1),
        ];
        let expected = expected
            .map(|(name, rows, parts)| (format!("model.layers.3.{name}.weight"), vec![rows, 8], parts));
        assert_eq!(names(tensors.clone()), expected);
        // Each row of the files' tensor, by the parameter and the row in it.
        let rows = |tensor: &FileTensor| {
            let Order::Turns(strips) = &tensor.order else { panic!("{:?}", tensor.order) };
            let of_turn: usize = strips.iter().map(|strip| strip.rows).sum();
            let turns = 0..tensor.dims[0] / of_turn;
            let strips = turns.flat_map(|turn| strips.iter().map(move |strip| (turn, *strip)));
            let of_strip = |(turn, Strip { part, first, rows }): (usize, Strip)| {
                (0..rows).map(move |row| (part, first + turn * rows + row))
            };
            strips.flat_map(of_strip).collect::<Vec<_>>()
        };
        let of = |part: usize, rows: std::ops::Range<usize>| rows.map(move |row| (part, row));
        let of_head = |head: usize| {
            let values = 15 * head..15 * (head + 1);
            let (query, key) = (3 * head..3 * (head + 1), 6 + 3 * head..6 + 3 * (head + 1));
            let value = 12 + values.start..12 + values.end;
            of(0, query).chain(of(0, key)).chain(of(0, value)).chain(of(1, values))
        };
        assert_eq!(rows(&tensors[0]), (0..2).flat_map(of_head).collect::<Vec<_>>());
        let gates = (0..2).flat_map(|head| [0, 1].map(|part| of(part, 3 * head..3 * (head + 1))));
        assert_eq!(rows(&tensors[1]), gates.flatten().collect::<Vec<_>>());
        assert!(tensors.iter().all(|tensor| match &tensor.order {
            Order::Turns(strips) =>
                (0..2).all(|part| strips.iter().filter(|strip| strip.part == part).count() <= STRIPS_MAX),
            _ => true,
        }));
    }
}
