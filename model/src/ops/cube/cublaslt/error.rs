//! The errors of queueing a product.

use std::fmt::Display;

use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::server::ServerError;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::DriverError;

/// The reason why a product could not be queued. No caller is waiting at that time, so the error is attached to the
/// memory of the result.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProductError {
    /// A call of cuBLASLt failed.
    #[error("{call} of cuBLASLt returned {status:?} for {what}")]
    Library {
        /// The function.
        call: &'static str,
        /// The status that cuBLASLt returned.
        status: cublasStatus_t,
        /// The product.
        what: String,
    },
    /// cuBLASLt has no algorithm for the product, whatever the workspace and alignments.
    #[error("cuBLASLt has no algorithm for the product {what}")]
    NoAlgorithm {
        /// The product.
        what: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed for {what}: {reason}")]
    Driver {
        /// The function.
        call: &'static str,
        /// Purpose of the call.
        what: String,
        /// The driver's error.
        reason: String,
    },
    /// CubeCL could not provide a stream or memory.
    #[error(transparent)]
    Server(#[from] ServerError),
}

impl ProductError {
    pub(super) fn no_algorithm(what: impl Display) -> Self {
        ProductError::NoAlgorithm { what: what.to_string() }
    }

    pub(super) fn library(call: &'static str, what: impl Display) -> impl FnOnce(CublasError) -> Self {
        move |error| ProductError::Library { call, status: error.0, what: what.to_string() }
    }

    pub(super) fn driver(call: &'static str, what: impl Display) -> impl FnOnce(DriverError) -> Self {
        move |error| ProductError::Driver { call, what: what.to_string(), reason: format!("{error:?}") }
    }
}

impl From<ProductError> for ServerError {
    fn from(error: ProductError) -> ServerError {
        match error {
            ProductError::Server(error) => error,
            error => ServerError::Generic { reason: error.to_string(), backtrace: BackTrace::capture() },
        }
    }
}
