//! Blocks and their parameter groups: how flat parameters map to tensors.
//!
//! Every block owns one group (possibly empty). Inside a group each parameter starts at a multiple of [`PARAM_ALIGN`]
//! elements; the group is padded to [`GROUP_ALIGN`] elements so that every kind of state fills whole pages. Padding
//! stays zero: its gradients are zero, and so is its state.
//!
//! If any parameter is quantized, all groups are laid out in bytes instead: an *element* of a group is then one byte, plain
//! parameters lie between quantized ones, and whatever moves or stores groups need not know the difference.

use crate::{BatchUse, Block, EngineError, MicroBatch, OutputSpec, ParamSpec, Result, Weight};
use std::collections::HashMap;
use std::ops::Range;
use terrace_device::Bytes;
use terrace_kernels::{DType, QuantizedView, View};

/// Alignment of a parameter inside its group, in elements: a cache line of any dtype.
pub(crate) const PARAM_ALIGN: usize = 64;
/// Padding of a group, in elements: a 4 KiB page of one-byte state.
const GROUP_ALIGN: usize = 4096;

/// A parameter's place in its group.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) spec: ParamSpec,
    /// First element of the flat group that it takes.
    pub(crate) offset: usize,
}

/// The flat parameters of one block.
#[derive(Debug, Clone)]
pub(crate) struct ParamGroup {
    pub(crate) name: String,
    pub(crate) params: Vec<Placed>,
    /// Padded number of elements.
    pub(crate) elements: usize,
}

/// A borrowed parameter: which group and which of its parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Borrow {
    pub(crate) group: usize,
    pub(crate) param: usize,
}

/// A network: blocks, their groups and who borrows what.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) blocks: Vec<Box<dyn Block>>,
    pub(crate) groups: Vec<ParamGroup>,
    pub(crate) borrows: Vec<Vec<Borrow>>,
    /// Of parameters that are not quantized.
    pub(crate) dtype: DType,
    /// Bytes of a group's element: those of the dtype, or 1 if parameters are quantized.
    pub(crate) element_bytes: usize,
}

impl Network {
    pub(crate) fn new(blocks: Vec<Box<dyn Block>>, dtype: DType) -> Result<Self> {
        if blocks.len() < 2 {
            return Err(EngineError::Model(
                "a network has at least two blocks, the last of which computes the loss".into(),
            ));
        }
        let mut owners: HashMap<String, Borrow> = HashMap::new();
        let (mut groups, mut borrows) = (Vec::new(), Vec::new());
        let quantized = blocks.iter().any(|block| block.params().iter().any(|p| p.quantized.is_some()));
        let element_bytes = if quantized { 1 } else { dtype.size() };
        for (index, block) in blocks.iter().enumerate() {
            let mut offset = 0;
            let mut params = Vec::new();
            for (param, spec) in block.params().iter().enumerate() {
                if owners.insert(spec.name.clone(), Borrow { group: index, param }).is_some() {
                    return Err(EngineError::Model(format!(
                        "parameter {} is owned by two blocks",
                        spec.name
                    )));
                }
                params.push(Placed { spec: spec.clone(), offset });
                offset = (offset + spec.bytes(dtype) / element_bytes).next_multiple_of(PARAM_ALIGN);
            }
            groups.push(ParamGroup {
                name: block.name().to_owned(),
                params,
                elements: offset.next_multiple_of(GROUP_ALIGN),
            });
            let found: Result<Vec<_>> = block
                .borrowed()
                .iter()
                .map(|name| {
                    owners.get(name).copied().filter(|b| b.group < index).ok_or_else(|| {
                        let block = block.name();
                        EngineError::Model(format!(
                            "block {block} borrows {name}, which no earlier block owns"
                        ))
                    })
                })
                .collect();
            borrows.push(found?);
        }
        Ok(Self { blocks, groups, borrows, dtype, element_bytes })
    }

    /// What one of `ranks` holds of the state: the same groups, each an equal part of the whole, padded as that is. Nothing runs on
    /// it: there are no blocks and no parameters.
    pub(crate) fn shard(&self, ranks: usize) -> Self {
        let part = |group: &ParamGroup| ParamGroup {
            name: group.name.clone(),
            params: Vec::new(),
            elements: group.elements.div_ceil(ranks).next_multiple_of(GROUP_ALIGN),
        };
        Self {
            blocks: Vec::new(),
            groups: self.groups.iter().map(part).collect(),
            borrows: self.borrows.clone(),
            dtype: self.dtype,
            element_bytes: self.element_bytes,
        }
    }

    /// Asks every block whether it can compute with a batch.
    pub(crate) fn check(&self, batch: &MicroBatch, of: BatchUse<'_>) -> Result {
        self.blocks.iter().try_for_each(|block| block.check(batch, of))
    }

    /// The first quantized parameter, if there is one.
    pub(crate) fn quantized(&self) -> Option<&ParamSpec> {
        self.groups.iter().flat_map(|g| &g.params).map(|p| &p.spec).find(|spec| spec.quantized.is_some())
    }

    /// A parameter of a group whose weights are `bytes`.
    pub(crate) fn weight<'a>(&self, group: usize, param: usize, bytes: Bytes<'a>) -> Weight<'a> {
        let Placed { spec, offset } = &self.groups[group].params[param];
        let start = offset * self.element_bytes;
        let bytes = bytes.slice(start, start + spec.bytes(self.dtype));
        match spec.quantized {
            Some(format) => Weight::Quantized(QuantizedView::new(bytes, format, &spec.dims)),
            None => Weight::Plain(View::new(bytes, self.dtype, &spec.dims)),
        }
    }

    /// The [parts](Block::parts) of a block as ranges of its group's elements, one after the other.
    pub(crate) fn parts(&self, block: usize) -> Vec<Range<usize>> {
        self.blocks[block].parts().iter().map(|part| self.elements_of(block, part)).collect()
    }

    /// The elements of a group that parameters take, with what lies between them and behind them.
    pub(crate) fn elements_of(&self, group: usize, params: &Range<usize>) -> Range<usize> {
        let group = &self.groups[group];
        let start = |param: usize| group.params.get(param).map_or(group.elements, |placed| placed.offset);
        start(params.start)..start(params.end)
    }

    /// Group and index of a block's parameters, own ones first, then borrowed.
    pub(crate) fn params_of(&self, block: usize) -> impl Iterator<Item = (usize, usize)> {
        let own = (0..self.groups[block].params.len()).map(move |param| (block, param));
        own.chain(self.borrows[block].iter().map(|b| (b.group, b.param)))
    }

    /// Index of the last block.
    pub(crate) fn last(&self) -> usize {
        self.blocks.len() - 1
    }

    /// The groups that block `index` needs, its own first, without repetition or empty ones.
    pub(crate) fn groups_of(&self, index: usize) -> Vec<usize> {
        let mut groups = vec![index];
        groups.extend(self.borrows[index].iter().map(|b| b.group));
        groups.retain(|&g| self.groups[g].elements > 0);
        let mut seen = Vec::new();
        groups.retain(|g| {
            let fresh = !seen.contains(g);
            seen.push(*g);
            fresh
        });
        groups
    }

    /// Number of parameters, without padding and counting shared ones once.
    pub(crate) fn parameters(&self) -> u64 {
        self.groups.iter().flat_map(|g| &g.params).map(|p| p.spec.elements() as u64).sum()
    }

    /// Padded elements of all groups.
    pub(crate) fn elements(&self) -> u64 {
        self.groups.iter().map(|g| g.elements as u64).sum()
    }

    /// Padded elements of the largest group.
    pub(crate) fn group_elements_max(&self) -> usize {
        self.groups.iter().map(|g| g.elements).max().unwrap_or(0)
    }

    /// Whether a later block uses group `group` too, so that its gradient comes in parts.
    pub(crate) fn is_shared(&self, group: usize) -> bool {
        self.borrows.iter().flatten().any(|b| b.group == group)
    }

    /// The signal that block `index` writes.
    pub(crate) fn output(
        &self,
        index: usize,
        sequences: usize,
        length: usize,
        dtype: DType,
        mode: crate::Mode,
    ) -> OutputSpec {
        self.blocks[index].output(sequences, length, dtype, mode)
    }
}

impl OutputSpec {
    /// Bytes of the signal.
    pub fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.size()
    }
}
