use kiln_debug::{DebugOptions, DebugTools};
use kiln_observe::page;
use kiln_train::metrics::print_line;
use kiln_train::run::{AttachedTools, ObservedRank, Observer, RunFacts, Tools};

use super::watch;

/// The tools of every run of this program.
#[derive(Clone, Debug, Default)]
pub struct RunTools(DebugTools);

impl RunTools {
    /// Creates tools with these debugging options.
    pub fn new(options: DebugOptions) -> Self {
        RunTools(DebugTools(options))
    }
}

impl Tools for RunTools {
    fn check(&self, ranks: usize, steps: u64, with_mpi: bool, on_gpu: bool) -> Result<(), String> {
        self.0.check(ranks, steps, with_mpi, on_gpu)
    }

    fn attach(&self, run: &RunFacts<'_>) -> Box<dyn AttachedTools> {
        let debug = self.0.attach(run);
        let address = run.http.filter(|_| run.ranks.contains(&0));
        let page = address.and_then(|address| match watch::serve(address, vec![run.out.to_owned()], false) {
            Ok(page) => {
                print_line(&format!("this run is at {}", page.url()));
                Some(page)
            }
            Err(error) => {
                tracing::warn!("log.http: {error}; the run continues without its page");
                None
            }
        });
        Box::new(Attached { debug, _page: page })
    }
}

struct Attached {
    debug: Box<dyn AttachedTools>,
    _page: Option<page::Server>,
}

impl AttachedTools for Attached {
    fn observers(&self, rank: ObservedRank) -> Vec<Box<dyn Observer>> {
        self.debug.observers(rank)
    }
}
