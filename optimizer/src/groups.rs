//! Parameter groups by name: which learning rate and weight decay each parameter gets.
//!
//! Rules are tried in order and the first whose pattern matches decides alone, so exceptions come before what they are
//! exceptions to. A parameter that no rule matches has the group's defaults. The result is a pure function of the name:
//! every process of a run and every resumed run come to the same groups.

use crate::error::{OptimizerError, Result};
use crate::ranges::{check, check_non_negative};

/// Rules for parameters by name.
///
/// ```
/// use terrace_optimizer::{GroupLr, GroupRule, ParamGroups};
///
/// let groups = ParamGroups::new(0.1)
///     .rule(GroupRule::new("*.bias").weight_decay(0.0))
///     .rule(GroupRule::new("*norm*").weight_decay(0.0))
///     .rule(GroupRule::new("embed*").lr(GroupLr::Scale(0.5)));
/// groups.check(["embed.weight", "layers.0.norm.weight", "layers.0.up.weight", "layers.0.up.bias"])?;
///
/// assert_eq!(groups.resolve("layers.0.up.bias", 1e-3)?.weight_decay, 0.0);
/// assert_eq!(groups.resolve("layers.0.up.weight", 1e-3)?.weight_decay, 0.1);
/// assert_eq!(groups.resolve("embed.weight", 1e-3)?.lr_scale, 0.5);
/// # Ok::<(), terrace_optimizer::OptimizerError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ParamGroups {
    /// Tried in order; the first match decides.
    pub rules: Vec<GroupRule>,
    /// The weight decay of rules that name none, and of parameters that no rule matches.
    pub weight_decay: f64,
}

/// What parameters with certain names get.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupRule {
    /// Matches whole names, in which `*` stands for any run of characters (dots included, empty too) and `?` for any
    /// single one. Nothing else is special.
    pub pattern: String,
    /// The learning rate.
    pub lr: GroupLr,
    /// The weight decay, if not that of the groups.
    pub weight_decay: Option<f64>,
    /// Whether the parameters stay as they are.
    pub frozen: bool,
}

/// The learning rate of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GroupLr {
    /// So many times the rate of the schedule.
    Scale(f64),
    /// A rate instead of the run's base rate; the schedule moves it in proportion, as torch's `LambdaLR` does.
    Own(f64),
}

/// What one parameter gets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResolvedGroup {
    /// Multiplied with the rate of the schedule at every step.
    pub lr_scale: f64,
    /// For [`StepArgs::weight_decay`](crate::StepArgs::weight_decay).
    pub weight_decay: f64,
    /// Whether the parameter is never updated and needs no moments.
    pub frozen: bool,
    /// The index of the rule that decided; `None` for the defaults. Parameters with the same index form a group.
    pub rule: Option<usize>,
}

impl GroupRule {
    /// A rule that changes nothing yet, which protects what it matches from later rules.
    pub fn new(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), lr: GroupLr::Scale(1.0), weight_decay: None, frozen: false }
    }

    /// The rule with this learning rate.
    #[must_use]
    pub fn lr(self, lr: GroupLr) -> Self {
        Self { lr, ..self }
    }

    /// The rule with this weight decay.
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay: Some(weight_decay), ..self }
    }

    /// The rule with its parameters left as they are.
    #[must_use]
    pub fn frozen(self) -> Self {
        Self { frozen: true, ..self }
    }

    /// Whether the rule speaks of the parameter `name`.
    pub fn matches(&self, name: &str) -> bool {
        glob(&self.pattern, name)
    }
}

impl ParamGroups {
    /// No rules: every parameter has the rate of the schedule and this weight decay.
    pub fn new(weight_decay: f64) -> Self {
        Self { rules: Vec::new(), weight_decay }
    }

    /// The groups with one more rule, tried after all others.
    #[must_use]
    pub fn rule(mut self, rule: GroupRule) -> Self {
        self.rules.push(rule);
        self
    }

    /// What the parameter `name` gets in a run whose base rate is `base_lr`.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`] when the deciding rule's rate or decay is negative or not finite, and for
    /// an own rate when the base rate is not positive, for then no schedule moves it in proportion.
    pub fn resolve(&self, name: &str, base_lr: f64) -> Result<ResolvedGroup> {
        let rule = self.rules.iter().position(|rule| rule.matches(name));
        let (lr, decay, frozen) = match rule.map(|index| &self.rules[index]) {
            None => (GroupLr::Scale(1.0), None, false),
            Some(rule) => (rule.lr, rule.weight_decay, rule.frozen),
        };
        let lr_scale = match lr {
            GroupLr::Scale(scale) => {
                check_non_negative("learning-rate scale of a parameter group", scale)?;
                scale
            }
            GroupLr::Own(own) => {
                check_non_negative("learning rate of a parameter group", own)?;
                let expected = "finite and positive beside a group with its own";
                check("learning rate", base_lr, expected, base_lr.is_finite() && base_lr > 0.0)?;
                own / base_lr
            }
        };
        let weight_decay = decay.unwrap_or(self.weight_decay);
        check_non_negative("weight_decay of a parameter group", weight_decay)?;
        Ok(ResolvedGroup { lr_scale, weight_decay, frozen, rule })
    }

    /// Refuses rules that speak of none of the model's parameters, which are most often misspelt.
    ///
    /// A rule all of whose parameters fall to earlier rules is fine: lists of rules are shared between models.
    ///
    /// # Errors
    /// [`OptimizerError::UnmatchedPattern`] names the first such pattern.
    pub fn check<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let mut unmatched: Vec<&GroupRule> = self.rules.iter().collect();
        for name in names {
            unmatched.retain(|rule| !rule.matches(name));
        }
        match unmatched.first() {
            None => Ok(()),
            Some(rule) => Err(OptimizerError::UnmatchedPattern(rule.pattern.clone())),
        }
    }
}

/// Whether all of `name` matches `pattern`, in at most `pattern.len() · name.len()` steps: on a mismatch the last `*`
/// takes one character more, and earlier ones never need to be reconsidered.
fn glob(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.chars(), name.chars());
    let mut retry: Option<(std::str::Chars<'_>, std::str::Chars<'_>)> = None;
    loop {
        let (before, mut rest) = (pattern.clone(), name.clone());
        match (pattern.next(), rest.next()) {
            (Some('*'), _) => {
                retry = Some((before, name.clone()));
                continue;
            }
            (None, None) => return true,
            (Some(p), Some(n)) if p == '?' || p == n => {
                name = rest;
                continue;
            }
            _ => {}
        }
        // From the `*` again, with the name one character shorter.
        let Some((star, mut from)) = retry.take() else { return false };
        if from.next().is_none() {
            return false;
        }
        (pattern, name) = (star, from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 5] = [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.up.weight",
        "model.layers.0.mlp.up.bias",
        "model.norm.weight",
    ];

    #[test]
    fn globs() {
        let yes = [
            ("", ""),
            ("*", ""),
            ("*", "anything.at.all"),
            ("*.bias", "layers.0.bias"),
            ("*.bias", "a.bias.bias"),
            ("*norm*", "model.norm.weight"),
            ("embed*", "embed"),
            ("a?c", "abc"),
            ("*a*b*", "xxaxxbxx"),
            ("**a", "ba"),
            ("*ab", "aab"),
            ("gewicht?", "gewichtß"),
            ("a[0]", "a[0]"),
        ];
        let no = [
            ("", "a"),
            ("?", ""),
            ("*.bias", "bias"),
            ("*.bias", "layers.0.bias2"),
            ("embed*", "model.embed"),
            ("a?c", "ac"),
            ("*a*b*", "xxbxxaxx"),
            ("a[0]", "a0"),
            ("Norm", "norm"),
        ];
        for (pattern, name) in yes {
            assert!(glob(pattern, name), "{pattern} matches {name}");
        }
        for (pattern, name) in no {
            assert!(!glob(pattern, name), "{pattern} does not match {name}");
        }
        let many = "a".repeat(2000);
        assert!(!glob(&"*a".repeat(20).replace("aa", "a").repeat(10), &format!("{many}b")));
    }

    #[test]
    fn the_first_match_decides_alone() {
        let groups = ParamGroups::new(0.1)
            .rule(GroupRule::new("*.0.mlp.up.bias"))
            .rule(GroupRule::new("*.bias").weight_decay(0.0).lr(GroupLr::Scale(2.0)))
            .rule(GroupRule::new("*norm*").weight_decay(0.0))
            .rule(GroupRule::new("*.embed*").lr(GroupLr::Own(1e-4)))
            .rule(GroupRule::new("*up.weight").frozen());
        let found = NAMES.map(|name| groups.resolve(name, 1e-3).unwrap());
        let plain = ResolvedGroup { lr_scale: 1.0, weight_decay: 0.1, frozen: false, rule: None };
        assert_eq!(found[0], ResolvedGroup { lr_scale: 1e-4 / 1e-3, rule: Some(3), ..plain });
        assert_eq!(found[1], ResolvedGroup { weight_decay: 0.0, rule: Some(2), ..plain });
        assert_eq!(found[2], ResolvedGroup { frozen: true, rule: Some(4), ..plain });
        assert_eq!(found[3], ResolvedGroup { rule: Some(0), ..plain }, "a protected bias keeps the defaults");
        assert_eq!(groups.resolve("lm_head", 1e-3), Ok(plain));
        let bias = groups.resolve("model.layers.1.mlp.up.bias", 1e-3).unwrap();
        assert_eq!((bias.lr_scale, bias.weight_decay), (2.0, 0.0));
    }

    #[test]
    fn a_pattern_without_parameters_is_refused_by_name() {
        let groups = ParamGroups::new(0.0).rule(GroupRule::new("*norm*"));
        assert_eq!(groups.check(NAMES), Ok(()));
        let covered = groups.clone().rule(GroupRule::new("*.layers.*norm*"));
        assert_eq!(covered.check(NAMES), Ok(()), "earlier rules may take all of a rule's parameters");
        let misspelt = groups.rule(GroupRule::new("*.bais"));
        let error = misspelt.check(NAMES).unwrap_err();
        assert_eq!(error, OptimizerError::UnmatchedPattern("*.bais".to_owned()));
        assert!(error.to_string().contains("`*.bais`"), "{error}");
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let all =
            |rule: GroupRule| ParamGroups::new(0.0).rule(rule).resolve("a", 1e-3).unwrap_err().to_string();
        let error = all(GroupRule::new("*").lr(GroupLr::Scale(-1.0)));
        assert!(error.starts_with("learning-rate scale of a parameter group"), "{error}");
        let error = all(GroupRule::new("*").lr(GroupLr::Own(f64::NAN)));
        assert!(error.starts_with("learning rate of a parameter group"), "{error}");
        let error = all(GroupRule::new("*").weight_decay(f64::INFINITY));
        assert!(error.starts_with("weight_decay of a parameter group"), "{error}");
        let own = ParamGroups::new(0.0).rule(GroupRule::new("*").lr(GroupLr::Own(1e-4)));
        let error = own.resolve("a", 0.0).unwrap_err().to_string();
        assert!(error.starts_with("learning rate is 0"), "{error}");
    }
}
