//! Operations whose kernels are found to be wrong are computed in plain burn. The set of these operations is global
//! to the process, so this test has its own process.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use kiln_model::ops::{self, FusedOp};
use kiln_model::verify::{Shapes, verify};

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().convert_dtype(DType::F32).try_to_vec().expect("just converted to f32")
}

#[test]
fn an_operation_that_is_wrong_becomes_plain() {
    let device = Device::flex();
    let shapes = Shapes { attention: vec![(64, Some(9))], experts: true };
    let dtypes = [FloatDType::F32, FloatDType::BF16];
    let findings = verify(&device, &dtypes, &shapes, None);
    // All except the kernels for warpgroups, which a CPU does not have.
    assert_eq!(findings.len(), 2 * (FusedOp::ALL.len() - 1));
    for finding in &findings {
        assert!(finding.is_right(), "{finding:?}");
        // Half precision rounds; an error of zero would mean that the reference was compared with itself.
        let error = finding.error.expect("a finite error");
        assert!(finding.dtype == FloatDType::F32 || error > 0.0, "{finding:?}");
    }

    let input = |rows: usize, seed: usize| {
        let values: Vec<f32> = (0..rows * 1028).map(|i| (i * seed % 97) as f32 / 31.0 - 1.5).collect();
        Tensor::<2>::from_data(TensorData::new(values, [rows, 1028]), &device)
    };
    let (x, weight) = (input(5, 7), input(1, 11).flatten::<1>(0, 1));
    let reference = values(ops::rms_norm_reference(x.clone(), weight.clone(), 1e-5));
    let before = values(ops::rms_norm(x.clone(), weight.clone(), 1e-5));
    assert_ne!(before, reference, "the kernel rounds elsewhere than the plain form");

    let findings = verify(&device, &dtypes, &shapes, Some(FusedOp::RmsNorm));
    let wrong: Vec<_> = findings.iter().filter(|finding| !finding.is_right()).collect();
    // Both dtypes, and none of the operations that consist of it: they use the plain form already.
    assert_eq!(wrong.len(), 2, "{wrong:?}");
    for finding in wrong {
        assert_eq!((finding.op, finding.place.as_str()), (FusedOp::RmsNorm, "output"));
        assert!(finding.error.is_some_and(|error| (0.9..1.1).contains(&error)), "{finding:?}");
    }
    assert_eq!(values(ops::rms_norm(x, weight, 1e-5)), reference);

    // The same with all operations plain: results are right, forward and backward.
    ops::use_plain(&FusedOp::ALL);
    let findings = verify(&device, &dtypes, &shapes, None);
    assert!(findings.iter().all(|finding| finding.is_right()), "{findings:?}");
}
