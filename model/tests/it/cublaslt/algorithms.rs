//! Measured algorithms for products, and the handling of wrong ones.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use burn::tensor::DType;
use kiln_model::ops::cube::matmul::{
    Output, ProductAlgorithms, matmul, measure_algorithms, measured_algorithms, use_algorithms,
    used_algorithms,
};

use super::{LIES, Trace, alone, bound, download, matrix, multiplied};
use crate::ops_support::assert_close;

/// The fastest of cuBLASLt's algorithms is found, stored and used. A second process uses the stored algorithm, and
/// skips stored algorithms that do not match.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn the_fastest_algorithm_is_measured_and_kept() {
    const FILE: &str = "KILN_TEST_ALGORITHMS";
    const NAME: &str = "cublaslt::algorithms::the_fastest_algorithm_is_measured_and_kept";
    // Algorithms belong to a process.
    if let Some(file) = env::var_os(FILE) {
        return measure_or_use(&PathBuf::from(file));
    }
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("algorithms.json");
    let run = || {
        let this = env::current_exe().expect("this program");
        let mut command = Command::new(this);
        command.args(["--exact", "--ignored", "--nocapture", NAME]);
        let status = command.env(FILE, &file).env("FAKE_CUBLASLT_SLOWEST", "3").status();
        assert!(status.expect("this program starts").success());
    };
    run();
    let text = fs::read_to_string(&file).expect("what was measured");
    run();
    // One for another version of the library, and one for another product.
    for (part, other) in [("\"library\":130000", "\"library\":130001"), ("\"k\":20", "\"k\":21")] {
        assert!(text.contains(part), "{text}");
        fs::write(&file, text.replace(part, other)).expect("a file");
        run();
    }
    // cuBLASLt refuses the algorithm.
    let algorithms: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let bytes = algorithms["products"][0][1]["algorithm"].to_string();
    fs::write(&file, text.replace(&bytes, "[1,2,3,4,5,6,7,8]")).expect("a file");
    run();
}

/// Measures if `file` does not exist yet; otherwise uses the algorithm in `file`, if it is for this product.
fn measure_or_use(file: &Path) {
    let kept = fs::read_to_string(file).ok();
    let measures = kept.is_none();
    let kept: Option<ProductAlgorithms> = kept.map(|text| serde_json::from_str(&text).expect("algorithms"));
    let fits = fs::read_to_string(file).is_ok_and(|text| {
        text.contains("130000") && text.contains("\"k\":20") && !text.contains("[1,2,3,4,5,6,7,8]")
    });
    match kept {
        Some(kept) => use_algorithms(kept),
        None => measure_algorithms(),
    }
    let (a, a_values) = matrix(1, [33, 20], LIES[0], DType::BF16);
    let (b, b_values) = matrix(2, [20, 17], LIES[1], DType::BF16);
    let (sum, old) = matrix(3, [33, 17], LIES[0], DType::BF16);
    let trace = Trace::start();
    let product = matmul(a.clone(), b.clone(), 1.0, Output::Add(sum));
    let products = multiplied(&a_values, &b_values, [33, 20, 17]);
    let expected: Vec<f64> = products.iter().zip(old).map(|(product, old)| product + old).collect();
    assert_close(&download(&product), &expected, bound(DType::BF16), "added once, whatever was measured");

    let places: Vec<String> = trace.products().iter().map(|line| line["place"].clone()).collect();
    if measures {
        // Each of three algorithms eight times, alternating; then the product itself.
        assert_eq!(places.len(), 3 * 8 + 1);
        assert_eq!(places.last().map(String::as_str), Some("2"));
        let measured = measured_algorithms();
        assert_eq!(measured.len(), 1);
        let [gain] = measured.gains()[..] else { panic!("{measured:?}") };
        assert!((gain - 3.0).abs() < 0.1, "{gain}");
        fs::write(file, serde_json::to_string(&measured).expect("JSON")).expect("a file");
    } else {
        assert_eq!(places, [if fits { "2" } else { "0" }]);
        assert!(measured_algorithms().is_empty());
        assert_eq!(used_algorithms(), usize::from(fits));
    }
    let trace = Trace::start();
    matmul(a, b, 1.0, Output::New(DType::BF16));
    assert_eq!(trace.count("cublaslt_matmul"), 1, "it is known by now");
}

/// An algorithm whose result differs from that of the first one is not used, however fast it is.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn a_wrong_algorithm_does_not_win() {
    const WRONG: &str = "FAKE_CUBLASLT_WRONG";
    const NAME: &str = "cublaslt::algorithms::a_wrong_algorithm_does_not_win";
    let Some(wrong) = env::var_os(WRONG) else {
        let _alone = alone();
        // Each algorithm takes a millisecond less than the one before it.
        for wrong in ["2", "3"] {
            let this = env::current_exe().expect("this program");
            let mut command = Command::new(this);
            command.args(["--exact", "--ignored", "--nocapture", NAME]);
            let status = command.env(WRONG, wrong).env("FAKE_CUBLASLT_SLOWEST", "3").status();
            assert!(status.expect("this program starts").success(), "algorithm {wrong} is wrong");
        }
        return;
    };
    measure_algorithms();
    let used = if wrong == "3" { "1" } else { "2" };
    for (seed, input, written) in
        [(1, DType::BF16, DType::BF16), (2, DType::BF16, DType::F32), (3, DType::F16, DType::F16)]
    {
        let (a, a_values) = matrix(seed, [33, 20], LIES[0], input);
        let (b, b_values) = matrix(10 * seed, [20, 17], LIES[1], input);
        let trace = Trace::start();
        let product = matmul(a, b, 1.0, Output::New(written));
        let expected = multiplied(&a_values, &b_values, [33, 20, 17]);
        assert_close(&download(&product), &expected, bound(written), "the product of a right algorithm");
        let places: Vec<String> = trace.products().iter().map(|line| line["place"].clone()).collect();
        // The wrong algorithm ran once, and the others eight times each; then the product itself.
        let wrong_place = if wrong == "3" { "2" } else { "1" };
        assert_eq!(places.iter().filter(|place| *place == wrong_place).count(), 1);
        assert_eq!((places.len(), places.last().map(String::as_str)), (2 * 8 + 1 + 1, Some(used)));
    }
    assert_eq!(measured_algorithms().gains().len(), 3);
}
