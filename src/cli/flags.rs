//! The flags that set what messages of the libraries name.
//!
//! Who embeds the libraries sets fields, so that is what their messages name. Whoever runs the command sets the same by flags.

/// What the libraries say, and what the command says instead. Longer phrases come before those that they begin with.
const FLAGS: [(&str, &str); 33] = [
    ("add another directory to EngineConfig::disks", "add another --disk path"),
    ("set EngineConfig::disks", "give --disk PATH"),
    ("with EngineConfig::disks", "with --disk PATH"),
    ("the EngineConfig::disks of the run", "the --disk paths of the run"),
    ("choose EngineConfig::disks on another disk", "choose an --output on another disk"),
    ("EngineConfig::host_budget", "--host-memory"),
    ("EngineConfig::device_budget", "--device-memory"),
    ("EngineConfig::kv_tier Host", "--kv host"),
    ("EngineConfig::kv_tier Disk", "--kv disk"),
    ("EngineConfig::dtype F32", "--dtype fp32"),
    ("EngineConfig::dtype", "--dtype"),
    ("CpuConfig::threads", "--threads"),
    ("Ranks::count", "--ranks"),
    ("Ranks::nodes", "--nodes"),
    ("BatchLimits::sequences", "--batch-size"),
    ("BatchLimits::length", "--seq-len"),
    ("BatchLimits::micro_batches", "--grad-accum"),
    ("BatchLimits::cache_length", "--max-new-tokens"),
    ("TrainingConfig::clip", "--clip"),
    ("WindowOverrides::kept_blocks None", "--activations auto"),
    ("WindowOverrides::kept_blocks", "--activations"),
    ("Accumulation::Vertical", "--accumulation vertical"),
    ("Placement::Host", "--offload host"),
    ("Placement::Disk", "--offload disk"),
    ("Durability::None", "--durability none"),
    ("Durability::Step or Checkpoint", "--durability step or checkpoint"),
    ("a smaller StateFormat", "a smaller --state"),
    ("original StateFormat", "original --state"),
    ("a smaller QuantFormat", "smaller --weights"),
    ("do not quantize (models::build)", "use --weights bf16"),
    ("with Engine::create", "without --resume"),
    ("Engine::resume", "--resume"),
    ("`HostDevice`", "`--device cpu`"),
];

/// A message in the words of the command.
pub(crate) fn in_flags(message: &str) -> String {
    FLAGS.iter().fold(message.to_owned(), |text, (field, flag)| text.replace(field, flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_phrase_begins_with_does_not_hide_it() {
        for (at, (field, flag)) in FLAGS.iter().enumerate() {
            assert_eq!(in_flags(field), *flag);
            let earlier = FLAGS[..at].iter().find(|(earlier, _)| field.contains(earlier));
            assert_eq!(earlier, None, "{field}");
        }
    }
}
