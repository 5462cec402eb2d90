//! The errors of queueing a product.

use std::fmt::Display;

use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::server::ServerError;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::DriverError;

/// Reason why a product could not be queued. No caller waits then, so the memory of the result carries the error.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProductError {
    #[error("{call} of cuBLASLt returned {status:?} for {what}")]
    Library { call: &'static str, status: cublasStatus_t, what: String },
    #[error("cuBLASLt has no algorithm for the product {what}")]
    NoAlgorithm { what: String },
    #[error("{call} failed for {what}: {reason}")]
    Driver { call: &'static str, what: String, reason: String },
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
