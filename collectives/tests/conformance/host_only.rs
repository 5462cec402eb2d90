//! A backend that cannot move GPU memory refuses it on every rank.

use kiln_collectives::{ArgumentError, Buffer, CommError, Communicator, DType, Work};
use kiln_conformance::{PATIENCE, World, label, on_each_rank};
use std::sync::Arc;

/// Checks that every operation of `make`'s worlds refuses buffers on a GPU.
pub fn check_refusal(make: impl Fn() -> World) {
    let device = cubecl::Device::Wgpu(cubecl::wgpu::WgpuDevice::default());
    let client = device.client();
    let buffer = |len| Buffer::zeros(DType::F32, len).to_device(&client);
    type Operation<'a> = &'a (dyn Fn(&dyn Communicator) -> Work + Sync);
    let operations: [Operation<'_>; 4] = [
        &|member| member.all_gather(label("p"), Arc::new(buffer(2)), buffer(4)),
        &|member| member.reduce_scatter(label("p"), Arc::new(buffer(4)), buffer(2)),
        &|member| member.all_reduce(label("p"), buffer(3)),
        &|member| member.broadcast(label("p"), buffer(3), 1),
    ];
    for operation in operations {
        let errors = on_each_rank(&make(), |member| operation(member.as_ref()).wait(PATIENCE).unwrap_err());
        for error in errors {
            let problem = ArgumentError::NoDeviceTransport;
            assert!(matches!(error, CommError::Invalid { problem: p, .. } if p == problem));
            let message = error.to_string();
            assert!(message.contains("no transport for device memory"), "{message}");
        }
    }
}
