//! Optimizers and schedules in the words of a user.
//!
//! An identity has them in the form in which Rust prints them for debugging, and is compared as it stands: another form would part a
//! state from the run that goes on from it. So the form is read here, for showing only, and what is not of it is shown as it is.

use std::iter::Peekable;
use std::str::Chars;

/// A printed value.
#[derive(Debug, PartialEq)]
struct Printed {
    name: String,
    /// With their names, where they have any.
    fields: Vec<(Option<String>, Printed)>,
}

/// A value's name, if it says anything, and its settings.
#[derive(Debug, Default)]
struct Described {
    name: String,
    settings: Vec<(String, String)>,
}

/// `adamw, beta1 0.9, beta2 0.999`; `text` itself if it is no printed structure.
pub(super) fn of(text: &str) -> String {
    let mut chars = text.chars().peekable();
    let Some(printed) =
        value(&mut chars).filter(|printed| chars.next().is_none() && !printed.fields.is_empty())
    else {
        return text.to_owned();
    };
    let Described { name, settings } = describe(&printed);
    let settings = settings.into_iter().map(|(key, value)| format!("{key} {value}"));
    let named = Some(user_name(&name).to_owned()).filter(|name| !name.is_empty());
    named.into_iter().chain(settings).collect::<Vec<_>>().join(", ")
}

fn describe(printed: &Printed) -> Described {
    let Printed { name, fields } = printed;
    if let [(None, inner)] = &fields[..] {
        // `Some(x)` is x, and `AdamW(AdamW { … })` is what is inside.
        let inner = describe(inner);
        return if name == "Some" { inner } else { Described { name: name.clone(), ..inner } };
    }
    let mut described = Described { name: name.clone(), settings: Vec::new() };
    for (key, field) in fields {
        let Described { name, settings } = describe(field);
        match key.as_deref() {
            // A schedule is called as its shape.
            Some("kind") => described.name = name,
            Some("momentum") if name == "None" => {
                described.settings.push(("cycle_momentum".into(), "false".into()));
            }
            Some(key) if settings.is_empty() && name != "None" => {
                described.settings.push((key.to_owned(), number(&name).to_owned()));
            }
            _ => {}
        }
        described.settings.extend(settings);
    }
    if name == SCHEDULE {
        let shape = described.name.clone();
        described.settings.retain_mut(|(key, value)| match parameter(&shape, key, value) {
            Some(known) => {
                *key = known;
                true
            }
            None => false,
        });
    }
    described
}

/// The structure that a schedule is printed as.
const SCHEDULE: &str = "ScheduleChoice";

/// The name of the parameter that sets `key` of a schedule; `None` if none does, and its value means nothing.
fn parameter(shape: &str, key: &str, value: &mut String) -> Option<String> {
    let deepspeed = matches!(shape, "WarmupLr" | "WarmupDecayLr" | "WarmupCosineLr");
    let name = match (shape, key) {
        ("OneCycle" | "LrRangeTest", "warmup_steps") => return None,
        (_, "warmup_steps") if deepspeed => "warmup_num_steps",
        (_, "warmup_steps") => "num_warmup_steps",
        (_, "total_steps") => "total_num_steps",
        ("LrRangeTest", "base_lr") => "lr_range_test_min_lr",
        (_, "base_lr") => "warmup_max_lr",
        ("WarmupCosineLr", "min_ratio") => "cos_min_ratio",
        ("Linear" | "Cosine" | "CosineWithRestarts", "min_ratio") => "min_lr_rate",
        (_, "min_ratio") => return None,
        (_, "min_lr") => "warmup_min_lr",
        (_, "warmup") => {
            *value = value.to_lowercase();
            "warmup_type"
        }
        (_, "cycles") => "num_cycles",
        (_, "end_lr") => "lr_end",
        (_, "step_size") => "lr_range_test_step_size",
        (_, "step_rate") => "lr_range_test_step_rate",
        (_, "staircase") => "lr_range_test_staircase",
        _ => key,
    };
    Some(name.to_owned())
}

/// What a flag calls it; nothing of what has no name there.
fn user_name(name: &str) -> &str {
    match name {
        "AdamW" => "adamw",
        "Adam" => "adam",
        "Adagrad" => "adagrad",
        "Lion" => "lion",
        "Sgd" => "sgd",
        "Constant" => "constant",
        "Linear" => "linear",
        "Cosine" => "cosine",
        "CosineWithRestarts" => "cosine_with_restarts",
        "Polynomial" => "polynomial",
        "InverseSqrt" => "inverse_sqrt",
        "WarmupLr" => "WarmupLR",
        "WarmupDecayLr" => "WarmupDecayLR",
        "WarmupCosineLr" => "WarmupCosineLR",
        "LrRangeTest" => "LRRangeTest",
        "LossScaleConfig" => "",
        other => other,
    }
}

/// Without the fraction of a whole number.
fn number(text: &str) -> &str {
    text.strip_suffix(".0").unwrap_or(text)
}

/// A name or number, and what is in brackets after it.
fn value(chars: &mut Peekable<Chars<'_>>) -> Option<Printed> {
    let name = word(chars);
    if name.is_empty() {
        return None;
    }
    let mut fields = Vec::new();
    match chars.peek() {
        Some('(') => {
            chars.next();
            loop {
                fields.push((None, value(chars)?));
                match chars.next()? {
                    ')' => break,
                    ',' => space(chars),
                    _ => return None,
                }
            }
        }
        // One between a name and its fields.
        Some(' ') => {
            chars.next();
            (chars.next()? == '{').then_some(())?;
            space(chars);
            loop {
                let key = word(chars);
                (chars.next()? == ':').then_some(())?;
                space(chars);
                fields.push((Some(key), value_in_fields(chars)?));
                match chars.next()? {
                    ' ' => break (chars.next()? == '}').then_some(())?,
                    ',' => space(chars),
                    _ => return None,
                }
            }
        }
        _ => {}
    }
    Some(Printed { name, fields })
}

/// A value that a space may follow which is not its own: that before the closing bracket.
fn value_in_fields(chars: &mut Peekable<Chars<'_>>) -> Option<Printed> {
    let mut ahead = chars.clone();
    word(&mut ahead);
    if ahead.next() == Some(' ') && ahead.next() == Some('}') {
        return Some(Printed { name: word(chars), fields: Vec::new() });
    }
    value(chars)
}

fn word(chars: &mut Peekable<Chars<'_>>) -> String {
    let mut word = String::new();
    while let Some(letter) =
        chars.next_if(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '+'))
    {
        word.push(letter);
    }
    word
}

fn space(chars: &mut Peekable<Chars<'_>>) {
    chars.next_if_eq(&' ');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SchedulerFlag;
    use terrace_optimizer::{AdamW, Algorithm, LossScaleConfig, Sgd};

    #[test]
    fn optimizers_are_shown_as_they_are_set() {
        let adamw = Algorithm::AdamW(AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 });
        assert_eq!(of(&format!("{adamw:?}")), "adamw, beta1 0.9, beta2 0.999, eps 1e-8, weight_decay 0");
        let sgd = Algorithm::Sgd(Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 });
        assert_eq!(of(&format!("{sgd:?}")), "sgd, momentum 0.9, nesterov true, weight_decay 0.1");
        let scale = of(&format!("{:?}", LossScaleConfig::default()));
        assert!(scale.starts_with("loss_scale 0, initial_scale_power 16, "), "{scale}");
    }

    /// What is shown of a schedule is what its flag says, and reads as the same schedule.
    #[test]
    fn schedules_are_shown_as_their_flags_say() {
        for flag in [
            "constant",
            "linear,min_lr_rate=0.5",
            "cosine,num_warmup_steps=7",
            "cosine_with_restarts,num_cycles=3",
            "polynomial,power=2,lr_end=1e-6",
            "inverse_sqrt,timescale=9",
            "WarmupLR,warmup_max_lr=0.1,warmup_type=linear,warmup_num_steps=4",
            "WarmupDecayLR,warmup_min_lr=0.001,total_num_steps=60",
            "WarmupCosineLR,warmup_min_ratio=0.5,cos_min_ratio=0.25",
            "OneCycle,cycle_min_lr=1e-6,cycle_max_lr=0.0001,cycle_second_step_size=3,cycle_min_mom=0.5",
            "OneCycle,cycle_min_lr=1e-6,cycle_max_lr=0.0001,cycle_momentum=false",
            "LRRangeTest,lr_range_test_min_lr=0.5,lr_range_test_step_size=2,lr_range_test_staircase=true",
        ] {
            let schedule = flag.parse::<SchedulerFlag>().unwrap().0;
            let words = of(&format!("{schedule:?}"));
            for part in flag.split(',') {
                let part = part.replace('=', " ");
                assert!(words.split(", ").any(|word| word == part), "{part:?} is in {words}");
            }
            let again: Vec<String> = words.split(", ").map(|pair| pair.replacen(' ', "=", 1)).collect();
            let again = again.join(",").parse::<SchedulerFlag>().unwrap_or_else(|e| panic!("{words}: {e}"));
            assert_eq!(again.0, schedule, "{words}");
        }
    }

    #[test]
    fn what_is_no_structure_is_shown_as_it_is() {
        for text in ["", "split", "checksum 0f", "Name(", "A { b: 1", "A { b: 1 } c", "a, b", "Name { }"] {
            assert_eq!(of(text), text);
        }
    }
}
