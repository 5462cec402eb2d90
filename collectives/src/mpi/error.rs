//! Why MPI could not be started.

/// Why MPI could not be started.
#[derive(Debug, thiserror::Error)]
pub enum MpiError {
    /// MPI can be started once per process only.
    #[error("MPI has been started in this process before; keep the first `Mpi` and clone it")]
    Started,
    /// The library does not let several threads communicate at once.
    #[error(
        "this MPI library grants thread level {granted}, Kiln needs Multiple; use one that is built \
         with support for threads"
    )]
    Threads {
        /// The thread level that the library grants.
        granted: String,
    },
    /// The system refused to start a thread.
    #[error("cannot start a thread for MPI: {0}; look at the limits of this machine")]
    Thread(#[from] std::io::Error),
}
