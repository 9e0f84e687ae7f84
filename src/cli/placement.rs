//! The table of `terrace plan`: what of which groups is in which tier; in words, and as `--json` and plan files have it.

use serde::{Deserialize, Serialize};
use terrace_tiers::ByteSize;
use terrace_zero::{Content, GroupPlacement, Place, Placed};

/// Groups that follow one another and have everything in the same places.
struct Run<'a> {
    groups: &'a [GroupPlacement],
    /// With the bytes of all groups.
    parts: Vec<Placed>,
}

impl Run<'_> {
    fn name(&self) -> String {
        match self.groups {
            [one] => one.name.clone(),
            [first, .., last] => format!("{} – {} ({})", first.name, last.name, self.groups.len()),
            [] => unreachable!("a run has a group"),
        }
    }
}

/// The runs of groups; none of groups of which there is nothing.
fn runs(placement: &[GroupPlacement]) -> Vec<Run<'_>> {
    let places = |group: &GroupPlacement| -> Vec<(Content, Place)> {
        group.parts.iter().map(|part| (part.content, part.place)).collect()
    };
    let same = placement.chunk_by(|a, b| places(a) == places(b));
    let sum = |groups: &[GroupPlacement]| {
        let mut parts = groups[0].parts.clone();
        for group in &groups[1..] {
            parts.iter_mut().zip(&group.parts).for_each(|(sum, part)| sum.bytes += part.bytes);
        }
        parts
    };
    let runs = same.map(|groups| Run { groups, parts: sum(groups) });
    runs.filter(|run| !run.parts.is_empty()).collect()
}

/// The table: a line for every run and place, with what is there.
pub(super) fn table(placement: &[GroupPlacement]) -> String {
    let mut rows = vec![["groups".into(), "in".into(), "bytes".into(), "what".into()]];
    for run in runs(placement) {
        let mut name = run.name();
        let mut places: Vec<Place> = Vec::new();
        run.parts.iter().for_each(|part| {
            if !places.contains(&part.place) {
                places.push(part.place);
            }
        });
        for place in places {
            let here: Vec<&Placed> = run.parts.iter().filter(|part| part.place == place).collect();
            let bytes: u64 = here.iter().map(|part| part.bytes).sum();
            let what = here.iter().map(|part| match here.len() {
                1 => part.content.words().to_owned(),
                _ => format!("{} {}", part.content.words(), ByteSize(part.bytes)),
            });
            let what = what.collect::<Vec<_>>().join(", ");
            rows.push([std::mem::take(&mut name), place.to_string(), ByteSize(bytes).to_string(), what]);
        }
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [groups, places, bytes] = [0, 1, 2].map(width);
    let line = |row: &[String; 4]| {
        let [name, place, size, what] = row;
        format!("{name:<groups$}  {place:<places$}  {size:>bytes$}  {what}")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A line of the table in documents: groups that follow one another and have everything in the same places.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedGroups {
    /// The name of the first group.
    pub first: String,
    /// That of the last.
    pub last: String,
    /// How many there are.
    pub groups: usize,
    /// What there is of them.
    pub parts: Vec<Part>,
}

/// A kind of what groups have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Which, in words.
    pub what: String,
    /// Of all these groups.
    pub bytes: u64,
    /// In words.
    pub place: String,
}

impl PlacedGroups {
    /// Of a plan.
    pub(super) fn all(placement: &[GroupPlacement]) -> Vec<Self> {
        let part = |part: &Placed| Part {
            what: part.content.words().to_owned(),
            bytes: part.bytes,
            place: part.place.to_string(),
        };
        let run = |run: Run<'_>| Self {
            first: run.groups[0].name.clone(),
            last: run.groups[run.groups.len() - 1].name.clone(),
            groups: run.groups.len(),
            parts: run.parts.iter().map(part).collect(),
        };
        runs(placement).into_iter().map(run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_tiers::{BlobKind, Tier};

    fn group(name: &str, parts: &[(Content, u64, Place)]) -> GroupPlacement {
        let parts = parts.iter().map(|&(content, bytes, place)| Placed { content, bytes, place }).collect();
        GroupPlacement { name: name.into(), parts }
    }

    #[test]
    fn groups_in_the_same_places_share_a_line() {
        let at = |home, host_copy| Place::In {
            home,
            host_copy,
            device_copy: false,
            saved: false,
            in_turns: false,
        };
        let (disk, copied) = (at(Tier::Disk, false), at(Tier::Disk, true));
        let [weights, moments] = [BlobKind::Weight, BlobKind::Moment1].map(Content::State);
        let layer = |name, place| {
            group(
                name,
                &[
                    (weights, 2048, place),
                    (moments, 4096, disk),
                    (Content::Activations, 99, Place::Recomputed),
                ],
            )
        };
        let placement = [
            group("embed", &[(weights, 1024, disk), (moments, 2048, disk)]),
            layer("layers.0", copied),
            layer("layers.1", copied),
            layer("layers.2", disk),
            group("nothing", &[]),
        ];
        let expected = "\
groups                   in                   bytes  what
embed                    disk              3.00 KiB  weights 1.00 KiB, first moments 2.00 KiB
layers.0 – layers.1 (2)  disk + host copy  4.00 KiB  weights
                         disk              8.00 KiB  first moments
                         recomputed           198 B  activations of blocks
layers.2                 disk              6.00 KiB  weights 2.00 KiB, first moments 4.00 KiB
                         recomputed            99 B  activations of blocks";
        assert_eq!(table(&placement), expected);
        let document = PlacedGroups::all(&placement);
        assert_eq!(document.len(), 3);
        let PlacedGroups { first, last, groups, parts } = &document[1];
        assert_eq!((&first[..], &last[..], *groups), ("layers.0", "layers.1", 2));
        assert_eq!((parts[0].bytes, &parts[0].place[..]), (4096, "disk + host copy"));
        let text = serde_json::to_string(&document).unwrap();
        assert_eq!(serde_json::from_str::<Vec<PlacedGroups>>(&text).unwrap(), document);
    }
}
