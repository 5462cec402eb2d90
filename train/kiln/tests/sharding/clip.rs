//! Clipping by the global norm.

use kiln_shard::{StateKind, Strategy, clip_factor};

use crate::reference;
use crate::support::{Rank, Run, assert_close};

/// Returns one run per strategy, on meshes with one axis and with two.
fn strategies() -> Vec<Run> {
    let run = |strategy: Strategy| {
        let shard_size = strategy.is_hybrid().then_some(2);
        Run { shard_size, ..Run::new(strategy, 4).steps(3) }
    };
    Strategy::ALL.into_iter().map(run).collect()
}

#[test]
fn norms_and_clipped_updates_are_those_of_one_device() {
    for tied in [false, true] {
        // Tied weights count once. Clipping is off, active, or far from active.
        for max_norm in [0.0, 0.05, 1e6] {
            let settings = |run: Run| Run { max_norm, ..run.tied(tied) };
            let expected = reference::train(&settings(strategies().remove(0)));
            for run in strategies().into_iter().map(settings) {
                assert_close(&format!("{}, max norm {max_norm}", run.name()), &run.train(), &expected);
            }
        }
    }
}

#[test]
fn no_clipping_is_clipping_far_away() {
    for run in strategies() {
        let off = Run { max_norm: 0.0, ..run.clone() }.train();
        let far = Run { max_norm: 1e6, ..run.clone() }.train();
        assert_eq!(off, far, "{}", run.name());
        let on = Run { max_norm: 0.05, ..run.clone() }.train();
        assert_eq!(on.gradients[0], off.gradients[0], "the norm is that of the raw gradient");
        assert_ne!(on.weights, off.weights, "{}", run.name());
    }
}

#[test]
fn norms_by_parameter_are_those_of_their_gradients() {
    for run in strategies() {
        run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            rank.gradients(1)?;
            let norms = rank.engine().grad_norms()?;
            let gradients = rank.values(StateKind::Gradient)?;
            assert_eq!(norms.len(), gradients.len());
            for (name, norm) in &norms {
                let squares = gradients[name].iter().map(|value| f64::from(*value).powi(2));
                let expected = squares.sum::<f64>().sqrt();
                assert!((norm - expected).abs() <= 1e-12 * expected, "{}: `{name}`", run.name());
            }
            let whole = norms.iter().map(|(_, norm)| norm * norm).sum::<f64>().sqrt();
            let expected = rank.engine().grad_norm()?;
            assert!((whole - expected).abs() <= 1e-12 * expected, "{}", run.name());
            Ok(())
        });
    }
}

#[test]
fn clip_factors() {
    // As in PyTorch, 1e-6 keeps the division finite.
    assert_eq!(clip_factor(2.0, 1.0), 1.0 / (2.0 + 1e-6));
    assert_eq!(clip_factor(0.5, 1.0), 1.0);
    assert_eq!(clip_factor(0.0, 1.0), 1.0);
    assert!(clip_factor(1.0, 1.0) < 1.0);
    // 0 switches clipping off, whatever the norm.
    assert_eq!(clip_factor(1e30, 0.0), 1.0);
    assert_eq!(clip_factor(0.0, 0.0), 1.0);
    assert_eq!(clip_factor(f64::INFINITY, 1.0), 0.0);
}
