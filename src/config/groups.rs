//! Parameter groups as flags: `--param-group 'PATTERN,lr=1e-5,weight-decay=0'`.

use std::fmt;
use std::str::FromStr;
use terrace_optimizer::{GroupLr, GroupRule};

/// The value of `--param-group`: a pattern, and what the parameters whose names match it get.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupFlag(pub GroupRule);

impl GroupFlag {
    /// What `--no-decay PATTERN` stands for.
    pub fn no_decay(pattern: &str) -> Self {
        Self(GroupRule::new(pattern).weight_decay(0.0))
    }
}

impl FromStr for GroupFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',').map(str::trim);
        let mut rule = GroupRule::new(parts.next().unwrap_or_default());
        if rule.pattern.is_empty() || rule.pattern.contains('=') {
            return Err(
                "it begins with a pattern of parameter names, for example '*norm*,weight-decay=0'".into()
            );
        }
        let mut given: Vec<&str> = Vec::new();
        for part in parts {
            let (key, value) = part.split_once('=').map_or((part, None), |(key, value)| (key, Some(value)));
            let kind = if key == "lr-scale" { "lr" } else { key };
            if given.contains(&kind) {
                return Err(format!("{kind} is given twice"));
            }
            given.push(kind);
            rule = match (key, value) {
                ("frozen", None) => rule.frozen(),
                ("lr", Some(value)) => rule.lr(GroupLr::Own(number(key, value)?)),
                ("lr-scale", Some(value)) => rule.lr(GroupLr::Scale(number(key, value)?)),
                ("weight-decay", Some(value)) => rule.weight_decay(number(key, value)?),
                _ => {
                    return Err(format!(
                        "\"{part}\" is unknown: after the pattern come lr=X or lr-scale=X, weight-decay=X, or frozen"
                    ));
                }
            };
        }
        if rule.frozen && given.len() > 1 {
            return Err("frozen parameters have no learning rate or weight decay: leave them out".into());
        }
        Ok(Self(rule))
    }
}

impl fmt::Display for GroupFlag {
    /// As it is written on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GroupRule { pattern, lr, weight_decay, frozen } = &self.0;
        f.write_str(pattern)?;
        match lr {
            GroupLr::Own(lr) => write!(f, ",lr={lr}")?,
            GroupLr::Scale(scale) if *scale != 1.0 => write!(f, ",lr-scale={scale}")?,
            GroupLr::Scale(_) => {}
        }
        if let Some(decay) = weight_decay {
            write!(f, ",weight-decay={decay}")?;
        }
        if *frozen { f.write_str(",frozen") } else { Ok(()) }
    }
}

fn number(key: &str, value: &str) -> Result<f64, String> {
    match value.parse() {
        Ok(number) if f64::is_finite(number) && number >= 0.0 => Ok(number),
        _ => Err(format!("{key}={value}: expected a finite number of zero or more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for text in [
            "*norm*,weight-decay=0",
            "*embed*,lr=0.0001",
            "*.up*,lr-scale=2,weight-decay=0.1",
            "*,frozen",
            "*.bias",
        ] {
            assert_eq!(text.parse::<GroupFlag>().unwrap().to_string(), text);
        }
        let embed: GroupFlag = "*embed* , lr=1e-4".parse().unwrap();
        assert_eq!(embed, GroupFlag(GroupRule::new("*embed*").lr(GroupLr::Own(1e-4))));
        assert_eq!(GroupFlag::no_decay("*norm*").to_string(), "*norm*,weight-decay=0");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, reason) in [
            ("", "begins with a pattern"),
            ("lr=1e-4", "begins with a pattern"),
            ("*,lr=fast", "lr=fast: expected a finite number"),
            ("*,weight-decay=-1", "weight-decay=-1"),
            ("*,lr=1,lr-scale=2", "lr is given twice"),
            ("*,decay=1", "\"decay=1\" is unknown"),
            ("*,lr", "\"lr\" is unknown"),
            ("*,frozen,lr=1", "frozen parameters have no"),
        ] {
            let error = text.parse::<GroupFlag>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
