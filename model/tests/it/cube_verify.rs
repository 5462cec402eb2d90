//! The check of a device's kernels that a run makes, on the device of these tests.

use kiln_model::verify::{Shapes, verify};

use crate::cube::{device, dtypes};

#[test]
fn kernels_are_found_right_on_wgpu() {
    let device = device();
    let dtypes: Vec<_> = dtypes().into_iter().map(|(dtype, _)| dtype).collect();
    let shapes = Shapes { attention: vec![(64, None), (20, Some(9))], experts: true };
    for finding in verify(&device, &dtypes, &shapes, None) {
        assert!(finding.is_right(), "{finding:?}");
    }
}
