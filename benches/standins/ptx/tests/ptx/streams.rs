//! Bugs planted into the use of streams: each report names both sides, with any delays, and the same
//! program without the bug runs and has the right result.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use kiln_ptx::streams::{Access, Event, Submitted, Use};

use crate::stream_setup::{BYTES, SEEDS, Setup, WORDS, planted, read, words};

/// Longer than any test here takes.
const PATIENCE: Duration = Duration::from_secs(600);

/// A kernel that runs first reads unwritten memory and stops there. The checker waits for the missing writer,
/// so that the report has both names in this case too.
#[test]
fn an_event_forgotten_before_the_first_write() {
    for seed in SEEDS {
        let setup = Setup::new(seed);
        let (a, b) = (setup.allocate(None), setup.allocate(None));
        setup.fill(1, a, 7);
        setup.launch(2, a, b);
        assert!(setup.device.synchronize().is_err());
        let told = setup.told.lock().unwrap();
        let expected =
            "not ordered: memset on stream 1 writes and launch of test on stream 2 reads bytes 0..";
        assert!(told.len() == 1 && told[0].starts_with(expected), "{told:?}");
    }
}

#[test]
fn an_event_forgotten() {
    let message = planted(|setup, bug| {
        let [a, b, c] = [(); 3].map(|()| setup.filled());
        setup.launch(1, a, b);
        if !bug {
            setup.order(1, 2);
        }
        setup.launch(2, b, c);
        if !bug {
            setup.device.synchronize().unwrap();
            assert_eq!(read(c), [9; WORDS]);
        }
    });
    assert!(
        message.starts_with(
            "not ordered: launch of test on stream 1 writes and launch of test on stream 2 reads bytes 0..256 of \
             allocation 2 (256 bytes)"
        ),
        "{message}"
    );
}

/// The event is waited for, but was recorded before the launch that it should cover.
#[test]
fn an_event_recorded_too_early() {
    let message = planted(|setup, bug| {
        let [a, b, c] = [(); 3].map(|()| setup.filled());
        let early = setup.device.record(1);
        setup.launch(1, a, b);
        let late = setup.device.record(1);
        let _ = setup.device.wait(2, if bug { &early } else { &late });
        setup.launch(2, b, c);
    });
    assert!(message.contains("stream 1 writes and launch of test on stream 2 reads"), "{message}");
}

#[test]
fn an_event_that_was_never_recorded_is_not_waited_for() {
    let setup = Setup::new(1);
    setup.device.wait(1, &Event::default()).unwrap();
    assert_eq!(setup.device.query(&Event::default()), Ok(true));
    setup.device.synchronize().unwrap();
}

#[test]
fn a_buffer_freed_early() {
    let message = planted(|setup, bug| {
        let (a, b) = (setup.allocate(Some(1)), setup.allocate(None));
        setup.fill(1, a, 7);
        setup.order(1, 2);
        setup.launch(2, a, b);
        if !bug {
            setup.order(2, 1);
        }
        setup.free(Some(1), a);
        if !bug {
            setup.device.synchronize().unwrap();
            assert_eq!(read(b), [8; WORDS]);
        }
    });
    assert!(
        message.starts_with(
            "not ordered: launch of test on stream 2 reads and free on stream 1 frees bytes 0..256"
        ),
        "{message}"
    );
}

#[test]
fn a_buffer_used_behind_its_free() {
    let message = planted(|setup, bug| {
        let (a, b) = (setup.allocate(Some(1)), setup.allocate(None));
        setup.fill(1, a, 7);
        if bug {
            setup.free(Some(1), a);
        }
        setup.launch(1, a, b);
        if !bug {
            setup.free(Some(1), a);
        }
    });
    assert!(
        message.starts_with(
            "used after it was freed: launch of test on stream 1 reads bytes 0..256 of allocation 1 (256 bytes), \
             which free on stream 1 frees"
        ),
        "{message}"
    );
}

#[test]
fn freed_memory_is_poisoned_when_its_stream_gets_there() {
    let setup = Setup::new(1);
    let a = setup.allocate(Some(1));
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    setup.fill(1, a, 7);
    setup.device.wait_on_host(&setup.device.record(1)).unwrap();
    let waits = Submitted::host_function(move || gate.lock().unwrap().recv().unwrap());
    setup.device.submit(1, waits).unwrap();
    setup.free(Some(1), a);
    assert_eq!(read(a), [7; WORDS]);
    assert_eq!(setup.device.query(&setup.device.record(1)), Ok(false));
    open.send(()).unwrap();
    setup.device.synchronize().unwrap();
    assert_eq!(read(a), [u32::MAX; WORDS]);
}

#[test]
fn memory_used_before_its_stream_has_allocated_it() {
    let message = planted(|setup, bug| {
        let a = setup.allocate(Some(1));
        if !bug {
            setup.order(1, 2);
        }
        setup.fill(2, a, 7);
    });
    assert!(
        message.starts_with("not ordered: allocation on stream 1 allocates and memset on stream 2"),
        "{message}"
    );
}

/// A copy to the host, and a copy from there to a device on another stream that does not wait for the first.
#[test]
fn a_copy_that_overtakes() {
    let message = planted(|setup, bug| {
        let (a, b, host) = (setup.allocate(None), setup.allocate(None), setup.pinned());
        setup.fill(1, a, 7);
        setup.copy(1, host, a);
        if !bug {
            setup.order(1, 2);
        }
        setup.copy(2, b, host);
    });
    assert!(
        message.starts_with(
            "not ordered: copy on stream 1 writes and copy on stream 2 reads bytes 0..256 of allocation 3"
        ),
        "{message}"
    );
}

/// The host writes the next content of a pinned buffer before the copy of the previous content has started.
#[test]
fn a_host_that_overtakes_a_copy() {
    let setup = |seed, bug: bool| {
        let setup = Setup::new(seed);
        let (a, host) = (setup.allocate(None), setup.pinned());
        let (open, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        setup
            .device
            .submit(1, Submitted::host_function(move || gate.lock().unwrap().recv().unwrap()))
            .unwrap();
        setup.copy(1, a, host);
        if bug {
            // SAFETY: the copy waits for the gate.
            unsafe { (host as *mut u32).write_volatile(1) };
        }
        open.send(()).unwrap();
        let _ = setup.device.synchronize();
        setup.told.lock().unwrap().join("\n")
    };
    for seed in SEEDS {
        assert_eq!(setup(seed, false), "");
        let message = setup(seed, true);
        assert!(message.starts_with("overwritten: the host has changed"), "{message}");
        assert!(message.contains("which copy on stream 1 was still to read"), "{message}");
    }
}

/// Two streams that write to different parts of a buffer, and to the same part.
#[test]
fn neighbours_are_told_apart() {
    let message = planted(|setup, bug| {
        let [a, b] = [(); 2].map(|()| setup.allocate(None));
        setup.fill(1, a, 7);
        setup.order(1, 2);
        let half = |at| vec![Access::new(at, BYTES / 2, Use::Write)];
        let write = |stream, at| setup.device.submit(stream, Submitted::call("half", half(at), || Ok(())));
        let _ = write(1, b);
        let _ = write(2, if bug { b + BYTES / 2 - 2 } else { b + BYTES / 2 });
    });
    assert!(message.contains("bytes 126..128 of allocation 2"), "{message}");
}

/// Operations that the host has waited for need no event.
#[test]
fn the_host_orders_streams() {
    let message = planted(|setup, bug| {
        let [a, b] = [(); 2].map(|()| setup.filled());
        setup.fill(1, a, 8);
        let event = setup.device.record(if bug { 2 } else { 1 });
        let _ = setup.device.wait_on_host(&event);
        setup.launch(2, a, b);
    });
    assert!(message.contains("memset on stream 1 writes and launch of test on stream 2 reads"), "{message}");
}

/// The default stream and blocking streams wait for each other.
#[test]
fn the_default_stream_orders_blocking_ones() {
    let message = planted(|setup, bug| {
        let [a, b, c] = [(); 3].map(|()| setup.filled());
        setup.device.create(3, !bug);
        setup.launch(0, a, b);
        setup.launch(3, b, c);
        if !bug {
            setup.launch(0, c, a);
            setup.device.synchronize().unwrap();
            assert_eq!(read(a), [10; WORDS]);
        }
    });
    assert!(
        message.contains("launch of test on stream 0 writes and launch of test on stream 3 reads"),
        "{message}"
    );
}

/// Order is transitive over a third stream, and does not come from an unrelated event.
#[test]
fn order_is_transitive() {
    let message = planted(|setup, bug| {
        let [a, b] = [(); 2].map(|()| setup.filled());
        setup.device.create(3, false);
        setup.fill(1, a, 8);
        if !bug {
            setup.order(1, 3);
        }
        setup.fill(3, b, 0);
        setup.order(3, 2);
        setup.launch(2, a, b);
    });
    assert!(message.contains("memset on stream 1 writes and launch of test on stream 2 reads"), "{message}");
}

/// A stream accepts four operations here; with the next one, the host waits until there is room.
#[test]
fn a_full_queue_makes_the_host_wait() {
    let setup = Setup::new(1);
    let (open, gate) = mpsc::channel::<()>();
    let (started, starts) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    setup.device.submit(1, Submitted::host_function(move || gate.lock().unwrap().recv().unwrap())).unwrap();
    let device = setup.device.clone();
    let count = Arc::new(Mutex::new(0));
    let counted = count.clone();
    let host = std::thread::spawn(move || {
        for _ in 0..4 {
            let counted = counted.clone();
            let function = Submitted::host_function(move || *counted.lock().unwrap() += 1);
            device.submit(1, function).unwrap();
            let _ = started.send(());
        }
    });
    // Three fit behind the first.
    (0..3).for_each(|_| starts.recv_timeout(PATIENCE).expect("a start"));
    assert!(starts.try_recv().is_err());
    open.send(()).unwrap();
    host.join().unwrap();
    setup.device.synchronize().unwrap();
    assert_eq!(*count.lock().unwrap(), 4);
}

/// A fault of a kernel ends the work of streams: every later call fails.
#[test]
fn a_fault_is_told_once_and_stays() {
    let setup = Setup::new(1);
    let [a, b] = [(); 2].map(|()| setup.allocate(None));
    // `a` is unwritten.
    setup.launch(1, a, b);
    assert!(setup.device.synchronize().is_err());
    setup.fill(1, a, 7);
    assert!(setup.device.synchronize().is_err() && setup.device.query(&setup.device.record(2)).is_err());
    let told = setup.told.lock().unwrap();
    assert_eq!(told.len(), 1);
    assert!(told[0].starts_with("uninitialised: nothing has written global memory"), "{told:?}");
    assert!(told[0].ends_with("launch of test on stream 1, operation 3"), "{told:?}");
}

/// The accesses of a kernel to adjacent allocations form one range across both.
#[test]
fn a_range_may_go_over_several_allocations() {
    let told_of = |bytes: u64| {
        let setup = Setup::new(1);
        let start = words();
        for half in [0, 1] {
            let _ = setup.device.allocated(start + half * BYTES / 2, BYTES / 2, None);
        }
        let used = vec![Access::new(start, bytes, Use::Write)];
        let _ = setup.device.submit(1, Submitted::call("fill", used, || Ok(())));
        let _ = setup.device.synchronize();
        setup.told.lock().unwrap().join("\n")
    };
    assert_eq!(told_of(BYTES), "");
    assert!(told_of(BYTES + 8).contains("not allocated: fill on stream 1"), "{}", told_of(BYTES + 8));
}
