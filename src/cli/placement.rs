//! The table of `terrace plan`: what of which groups is in which tier.

use serde_json::{Value, json};
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

/// The same for `--json`.
pub(super) fn document(placement: &[GroupPlacement]) -> Vec<Value> {
    let part = |part: &Placed| json!({ "what": part.content.words(), "bytes": part.bytes, "place": part.place.to_string() });
    let run = |run: Run<'_>| {
        json!({
            "first": run.groups[0].name,
            "last": run.groups[run.groups.len() - 1].name,
            "groups": run.groups.len(),
            "parts": run.parts.iter().map(part).collect::<Vec<_>>(),
        })
    };
    runs(placement).into_iter().map(run).collect()
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
        let document = document(&placement);
        assert_eq!(document.len(), 3);
        assert_eq!(
            (&document[1]["last"], &document[1]["parts"][0]["bytes"]),
            (&json!("layers.1"), &json!(4096))
        );
    }
}
