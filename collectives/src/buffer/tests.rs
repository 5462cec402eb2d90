use super::*;
use half::{bf16, f16};

#[test]
fn holds_every_element_type_aligned_and_zeroed() {
    fn check<T: Element + PartialEq + fmt::Debug>() {
        for len in [0, 1, 63, 64, 65, 1023] {
            let mut buffer = Buffer::zeros(T::DTYPE, len);
            assert_eq!(buffer.dtype(), T::DTYPE);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.is_empty(), len == 0);
            assert_eq!(buffer.size_in_bytes(), len * size_of::<T>());
            assert_eq!(T::DTYPE.size(), size_of::<T>());
            assert_eq!(buffer.as_slice::<T>().unwrap(), vec![T::zeroed(); len]);
            assert_eq!(buffer.as_mut_slice::<T>().unwrap().len(), len);
            assert_eq!(buffer.as_ref().as_ptr() as usize % 64, 0);
        }
    }
    check::<f64>();
    check::<f32>();
    check::<f16>();
    check::<bf16>();
    check::<u8>();
}

#[test]
fn copies_are_deep_and_debug_hides_contents() {
    let original = Buffer::from_slice(&[1.0f32, 2.0, 3.0]);
    let mut copy = original.clone();
    copy.as_mut_slice::<f32>().unwrap()[0] = 9.0;
    assert_eq!(original.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(format!("{original:?}"), "Buffer { dtype: F32, len: 3 }");
}

#[test]
fn shared_memory_is_copied_before_it_is_written() {
    for len in [3, 16, 40] {
        let chunks = [vec![1.0f32; len], vec![2.0; len]];
        let inputs: Vec<_> = chunks.iter().map(|chunk| Arc::new(Buffer::from_slice(chunk))).collect();
        let whole = Buffer::concatenated(DType::F32, &inputs);
        let mut other = whole.clone();
        assert!(whole.is_shared() && whole.as_bytes().as_ptr() == other.as_bytes().as_ptr());
        other.as_mut_slice::<f32>().unwrap()[0] = 9.0;
        assert!(whole.as_slice::<f32>().unwrap() == chunks.concat(), "{len}");
        assert!(!other.is_shared() && other.as_slice::<f32>().unwrap()[0] == 9.0);
    }
}

#[test]
fn memory_comes_with_the_first_write() {
    let mut buffer = Buffer::unallocated(DType::F32, 5).like(7);
    assert!(!buffer.is_allocated() && buffer.is_on_host() && buffer.len() == 7);
    assert_eq!(buffer.as_mut_slice::<f32>().unwrap(), [0.0; 7]);
    assert!(buffer.is_allocated());
}

#[test]
fn refuses_the_wrong_type() {
    let mut buffer = Buffer::from_slice(&[1.0f32, 2.0]);
    let error = buffer.as_slice::<f16>().unwrap_err();
    assert_eq!(error.to_string(), "the buffer holds 2 elements of f32, but was read as f16");
    assert_eq!(buffer.as_mut_slice::<f16>().unwrap_err(), error);
}
