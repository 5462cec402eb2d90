use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_model::ops::{embedding, embedding_reference};

use crate::ops_support::*;

type Embedding = fn(Tensor<2>, Tensor<2, Int>) -> Tensor<3>;

fn ids(values: Vec<i64>, [batch, seq]: [usize; 2]) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(values, [batch, seq]), &Device::flex())
}

/// Returns an embedding whose ids repeat, so that gradients add up and some rows of the table are unused.
fn operation(f: Embedding, [batch, seq, vocab, d_model]: [usize; 4]) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let values = (0..batch * seq).map(|i| (i * i % vocab) as i64).collect();
        let y = f(t[0].clone().reshape([vocab, d_model]), ids(values, [batch, seq]));
        y.reshape([batch * seq * d_model])
    }
}

#[test]
fn embedding_matches_reference() {
    for shape @ [_, _, vocab, d_model] in [[1, 1, 17, 20], [2, 33, 17, 20], [3, 257, 100, 300]] {
        let (op, reference) = (operation(embedding, shape), operation(embedding_reference, shape));
        assert_matches(op, reference, &[vocab * d_model], 1e-6);
    }
}

#[test]
fn embedding_is_sound() {
    assert_sound(operation(embedding, [2, 5, 7, 3]), &[7 * 3]);
    assert_same_bits(operation(embedding, [4, 500, 300, 200]), &[300 * 200]);
}

#[test]
#[should_panic(expected = "id 17 is outside a vocabulary of 17")]
fn embedding_rejects_an_id_beyond_the_vocabulary() {
    embedding(Tensor::ones([17, 4], &Device::flex()), ids(vec![0, 17], [1, 2]));
}

#[test]
#[should_panic(expected = "id -1 is outside a vocabulary of 17")]
fn embedding_rejects_a_negative_id() {
    embedding(Tensor::ones([17, 4], &Device::flex()), ids(vec![0, -1], [1, 2]));
}
