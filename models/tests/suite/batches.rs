//! Inputs of the blocks, and what is refused.

use terrace_models::batch::{IDS, INV_FREQ, LABELS, LAST, POSITIONS, STARTS};
use terrace_models::{ModelConfig, Row, TokenBatch};
use terrace_zero::MicroBatch;

#[test]
fn training_rows_are_shifted_and_padded() {
    let batch = builder().train(
        &[Row { ids: &[1, 2, 3, 4], labels: &[-100, 2, -1, 4] }, Row { ids: &[5, 6], labels: &[5, 6] }],
        3,
        5,
    );
    let batch = batch.unwrap();
    assert_eq!((batch.sequences, batch.length, batch.loss_terms), (3, 5, 3));
    assert_eq!(column(&batch, IDS), [1, 2, 3, 4, 0, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0]);
    let none = -100;
    let labels = [2, none, 4, none, none, 6, none, none, none, none, none, none, none, none, none];
    assert_eq!(column(&batch, LABELS), labels);
    assert_eq!(column(&batch, POSITIONS), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
    assert_eq!(column(&batch, STARTS), [0, 0, 0]);
    assert_eq!(column(&batch, LAST), [3, 6, 10]);
}

#[test]
fn generation_continues_at_its_starts() {
    let batch = builder().generate(&[&[7, 8], &[9]], &[3, 0], 3).unwrap();
    assert_eq!(column(&batch, IDS), [7, 8, 0, 9, 0, 0]);
    assert_eq!(column(&batch, POSITIONS), [3, 4, 5, 0, 1, 2]);
    assert_eq!(column(&batch, STARTS), [3, 0]);
    assert_eq!(column(&batch, LAST), [1, 3]);
    let batch = builder().decode(&[4, 5], &[9, 2]).unwrap();
    assert_eq!((batch.length, column(&batch, POSITIONS)), (1, vec![9, 2]));
    assert_eq!(column(&batch, LAST), [0, 1]);
}

/// As in transformers the longest row of a batch decides, not what pads it; but all steps of a generation have the same.
#[test]
fn long_sequences_have_frequencies_of_their_own() {
    let config = ModelConfig::parse(
        r#"{"architectures": ["Phi3ForCausalLM"], "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "original_max_position_embeddings": 3, "max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [2, 4]}}"#,
    );
    let batches = TokenBatch::new(&config.unwrap());
    let frequencies = |batch: MicroBatch| {
        let bytes = &batch.inputs[INV_FREQ].bytes;
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let (short, long) = (vec![1.0, 0.01], vec![0.5, 0.0025]);
    let row = |len: usize| Row { ids: &[1; 8][..len], labels: &[1; 8][..len] };
    assert_eq!(frequencies(batches.train(&[row(3), row(2)], 2, 8).unwrap()), short);
    assert_eq!(frequencies(batches.train(&[row(2), row(4)], 2, 8).unwrap()), long);
    assert_eq!(frequencies(batches.prefill(&[&[1, 2]], 8).unwrap()), short);
    assert_eq!(frequencies(batches.decode(&[1], &[3]).unwrap()), long);
    let reaching = |positions| batches.clone().reaching(positions);
    assert_eq!(frequencies(reaching(4).prefill(&[&[1, 2]], 8).unwrap()), long);
    assert_eq!(frequencies(reaching(3).prefill(&[&[1, 2]], 8).unwrap()), short);
}

#[test]
fn bad_rows_are_refused_with_their_place() {
    let message = |rows: &[Row<'_>]| builder().train(rows, 1, 4).unwrap_err().to_string();
    let good = Row { ids: &[1, 2], labels: &[1, 2] };
    assert!(message(&[good, good]).contains("2 rows for a batch of 1"));
    assert!(message(&[Row { ids: &[1; 5], labels: &[1; 5] }]).contains("5 tokens for a length of 4"));
    assert!(message(&[Row { ids: &[1, 2], labels: &[1] }]).contains("2 ids, 1 labels"));
    let unknown = message(&[Row { ids: &[1, 16], labels: &[1, 2] }]);
    assert!(unknown.contains("id 16 at position 1 of row 0 is outside the vocabulary of 16"), "{unknown}");
    let unknown = message(&[Row { ids: &[1, 2], labels: &[1, 99] }]);
    assert!(unknown.contains("label 99 at position 1 of row 0"), "{unknown}");
    let empty = builder().prefill(&[&[]], 4).unwrap_err().to_string();
    assert!(empty.contains("prompt 0 has no tokens"), "{empty}");
    assert!(builder().generate(&[&[1]], &[0, 0], 1).is_err());
    assert!(builder().decode(&[1], &[usize::MAX >> 1]).is_err());
}

fn builder() -> TokenBatch {
    let config = ModelConfig::parse(
        r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8,
            "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}"#,
    );
    TokenBatch::new(&config.unwrap())
}

fn column(batch: &MicroBatch, input: usize) -> Vec<i32> {
    batch.inputs[input].bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
}
