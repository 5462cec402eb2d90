//! How far a long piece of work is, for people: a line that changes on a terminal, and one every few seconds
//! elsewhere.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::process::Repeat;
use crate::process::output::{self, say};

/// Time between two lines where there is no terminal.
const PAUSE: Duration = Duration::from_secs(5);

/// Time between two frames on a terminal, so that the clock goes on while nothing is heard.
const FRAME: Duration = Duration::from_millis(200);

/// What is being done now, until this is dropped.
pub(super) struct ProgressLine {
    bar: Option<ProgressBar>,
    ticker: Option<Ticker>,
}

impl ProgressLine {
    /// Nothing is said yet; work that is done in a moment needs no such line.
    pub(super) fn start(what: &str) -> Self {
        let bar = output::watched_bar(0, "{bar:24} {msg} | {elapsed}");
        if let Some(bar) = &bar {
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(FRAME);
        }
        let ticker = bar.is_none().then(|| Ticker::start(what, PAUSE, say)).flatten();
        ProgressLine { bar, ticker }
    }

    /// From now on `what` is being done, of which `done` of `of` is done; `of` is 0 if that is not known.
    pub(super) fn set(&self, what: String, done: u64, of: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(of);
            bar.set_position(done.min(of));
            bar.set_message(what);
        } else if let Some(ticker) = &self.ticker {
            ticker.set(what);
        }
    }

    /// Lets `tell` write whole lines.
    pub(super) fn interrupt(&self, tell: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(tell),
            None => tell(),
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Says every now and then what is being done.
struct Ticker {
    what: Arc<Mutex<String>>,
    _repeat: Repeat,
}

impl Ticker {
    /// `None` where the system has no thread left: nothing depends on what is said.
    fn start(what: &str, pause: Duration, say: impl Fn(&str) + Send + 'static) -> Option<Self> {
        let what = Arc::new(Mutex::new(what.to_owned()));
        let (said, start) = (what.clone(), Instant::now());
        let repeat = Repeat::every(pause, "kiln-progress", move |is_last| {
            if !is_last {
                // Whoever works does not wait for a reader.
                let what = said.lock().unwrap_or_else(PoisonError::into_inner).clone();
                say(&format!("data: {what} ({} s so far)", start.elapsed().as_secs()));
            }
        });
        Some(Ticker { what, _repeat: repeat.ok()? })
    }

    fn set(&self, what: String) {
        // Any text may be said.
        *self.what.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_is_done_now_is_said_again_and_again_until_it_ends() {
        let (sender, lines) = mpsc::channel();
        // Waits for the reader at every line.
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let ticker = Ticker::start("reading", Duration::ZERO, move |line: &str| {
            let _ = sender.send(line.to_owned());
            let _ = may_go_on.recv();
        });
        let ticker = ticker.unwrap();
        assert!(lines.recv().unwrap().starts_with("data: reading ("));
        ticker.set("encoded 3 MB".to_owned());
        for _ in 0..3 {
            go_on.send(()).unwrap();
            assert!(lines.recv().unwrap().starts_with("data: encoded 3 MB ("));
        }
        drop(go_on);
        drop(ticker);
        // The thread has ended, and its end of the channel with it.
        while let Ok(line) = lines.recv() {
            assert!(line.starts_with("data: encoded"), "{line}");
        }
    }

    #[test]
    fn work_that_is_done_sooner_says_nothing_however_often_it_is_heard_of() {
        let (sender, lines) = mpsc::channel();
        let ticker = Ticker::start("reading", Duration::from_secs(1 << 20), move |line: &str| {
            let _ = sender.send(line.to_owned());
        });
        let ticker = ticker.unwrap();
        for count in 0..1000 {
            ticker.set(format!("encoded {count} MB"));
        }
        drop(ticker);
        assert!(lines.recv().is_err());
    }
}
