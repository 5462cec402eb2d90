use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kiln_observe::ask::ToPrompt;

/// The prompts of one process, and the ranks held there.
#[derive(Debug, Default)]
pub struct Prompts {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    prompts: BTreeMap<u64, Prompt>,
    next: u64,
    held: BTreeMap<usize, Held>,
    lines: BTreeMap<usize, VecDeque<String>>,
    is_open: bool,
    is_over: bool,
}

#[derive(Debug)]
struct Prompt {
    /// The rank that the prompt is for; `None` for any held rank.
    rank: Option<usize>,
    out: Sender<ToPrompt>,
}

#[derive(Debug)]
struct Held {
    place: String,
    ask: String,
}

impl State {
    /// Returns the rank that a prompt talks to: the requested one, or else the first held one, or else rank 0.
    fn rank_of(&self, prompt: &Prompt) -> usize {
        prompt.rank.or_else(|| self.held.keys().next().copied()).unwrap_or(0)
    }

    fn send(&mut self, rank: usize, message: &ToPrompt) {
        let mine: Vec<_> = self
            .prompts
            .iter()
            .filter(|(_, prompt)| self.rank_of(prompt) == rank)
            .map(|(id, _)| *id)
            .collect();
        for id in mine {
            let is_there =
                self.prompts.get(&id).is_some_and(|prompt| prompt.out.send(message.clone()).is_ok());
            if !is_there {
                self.prompts.remove(&id);
            }
        }
    }
}

impl Prompts {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open(&self) {
        self.lock().is_open = true;
    }

    pub(super) fn is_open(&self) -> bool {
        self.lock().is_open
    }

    /// Connects a prompt for `rank`, or for any held rank, and sends it that rank's place.
    pub fn attach(&self, rank: Option<usize>) -> (u64, Receiver<ToPrompt>) {
        let (out, messages) = mpsc::channel();
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        let prompt = Prompt { rank, out };
        let held = state.held.get(&state.rank_of(&prompt));
        let told = match held {
            _ if state.is_over => vec![ToPrompt::End],
            Some(Held { place, ask }) => vec![ToPrompt::Text(place.clone()), ToPrompt::Ask(ask.clone())],
            None => vec![ToPrompt::Running],
        };
        told.into_iter().for_each(|message| _ = prompt.out.send(message));
        state.prompts.insert(id, prompt);
        (id, messages)
    }

    /// Removes a prompt.
    pub fn detach(&self, prompt: u64) {
        self.lock().prompts.remove(&prompt);
    }

    /// Queues a line that was typed at a prompt.
    pub fn line(&self, prompt: u64, line: &str) {
        let mut state = self.lock();
        let Some(rank) = state.prompts.get(&prompt).map(|prompt| state.rank_of(prompt)) else { return };
        // Removes the byte that marks the debugger's own lines.
        let line = line.replace('\0', "");
        state.lines.entry(rank).or_default().push_back(line);
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn has_line(&self, rank: usize) -> bool {
        self.lock().lines.get(&rank).is_some_and(|lines| !lines.is_empty())
    }

    /// Returns `true` if a prompt shows the messages of `rank`, now or once the other held ranks are released.
    pub(super) fn has_prompt(&self, rank: usize) -> bool {
        self.lock().prompts.values().any(|prompt| prompt.rank.is_none_or(|of| of == rank))
    }

    pub(super) fn hold(&self, rank: usize, place: &str, ask: &str) {
        let mut state = self.lock();
        // Lines typed while the run continued were for rank 0, which has read them.
        if rank != 0 {
            state.lines.remove(&rank);
        }
        state.held.insert(rank, Held { place: place.to_owned(), ask: ask.to_owned() });
        state.send(rank, &ToPrompt::Text(place.to_owned()));
        state.send(rank, &ToPrompt::Ask(ask.to_owned()));
    }

    pub(crate) fn held(&self) -> Vec<String> {
        self.lock().held.values().map(|held| held.place.clone()).collect()
    }

    /// Sends `text` from `rank`, and asks for the next line with `ask` if the rank stays held.
    pub(super) fn send(&self, rank: usize, text: &str, ask: Option<&str>) {
        let mut state = self.lock();
        if !text.is_empty() {
            state.send(rank, &ToPrompt::Text(text.to_owned()));
        }
        if let Some(ask) = ask {
            if let Some(held) = state.held.get_mut(&rank) {
                ask.clone_into(&mut held.ask);
            }
            state.send(rank, &ToPrompt::Ask(ask.to_owned()));
        }
    }

    pub(super) fn release(&self, rank: usize) {
        let mut state = self.lock();
        // Sent before the release, so that prompts for any held rank receive it.
        state.send(rank, &ToPrompt::Running);
        state.held.remove(&rank);
        // These prompts switch to the next held rank.
        let Some((&next, Held { place, ask })) = state.held.first_key_value() else { return };
        let (place, ask) = (ToPrompt::Text(place.clone()), ToPrompt::Ask(ask.clone()));
        let free = state.prompts.values().filter(|prompt| prompt.rank.is_none());
        if rank < next {
            free.for_each(|prompt| {
                _ = prompt.out.send(place.clone()).and_then(|()| prompt.out.send(ask.clone()))
            });
        }
    }

    /// Returns the next line for `rank` if one arrives within `patience`.
    pub(super) fn next(&self, rank: usize, patience: Duration) -> Option<String> {
        let is_empty = |state: &mut State| state.lines.get(&rank).is_none_or(VecDeque::is_empty);
        let waited = self.changed.wait_timeout_while(self.lock(), patience, is_empty);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.lines.get_mut(&rank).and_then(VecDeque::pop_front)
    }

    /// Ends all prompts: the run is over.
    pub fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        state.prompts.values().for_each(|prompt| _ = prompt.out.send(ToPrompt::End));
        state.prompts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_reach_the_held_rank_and_replies_return() {
        let prompts = Prompts::default();
        let (one, messages) = prompts.attach(None);
        assert_eq!(messages.try_recv(), Ok(ToPrompt::Running));
        prompts.hold(2, "rank 2 is here", "(rank 2) ");
        assert_eq!(messages.try_recv(), Ok(ToPrompt::Text("rank 2 is here".to_owned())));
        assert_eq!(messages.try_recv(), Ok(ToPrompt::Ask("(rank 2) ".to_owned())));
        prompts.line(one, "w");
        assert!(prompts.has_line(2) && !prompts.has_line(0));
        assert_eq!(prompts.next(2, Duration::ZERO), Some("w".to_owned()));
        assert_eq!(prompts.next(2, Duration::ZERO), None);
        let (_, late) = prompts.attach(Some(2));
        assert_eq!(late.try_recv(), Ok(ToPrompt::Text("rank 2 is here".to_owned())));
        let (_, other) = prompts.attach(Some(1));
        assert_eq!(other.try_recv(), Ok(ToPrompt::Running));
        drop(late);
        prompts.send(2, "hello", Some("> "));
        assert_eq!(messages.try_recv(), Ok(ToPrompt::Text("hello".to_owned())));
        prompts.detach(one);
        assert!(!prompts.has_prompt(2), "the others are gone, or for another rank");
        let (_, any) = prompts.attach(None);
        prompts.hold(3, "rank 3 is here", "(rank 3) ");
        prompts.release(2);
        let told: Vec<_> = any.try_iter().skip(2).collect();
        let next = [ToPrompt::Running, ToPrompt::Text("rank 3 is here".to_owned())];
        assert_eq!(told[..2], next, "a prompt for whichever rank goes on to the next");
        prompts.end();
        assert_eq!(other.try_recv(), Ok(ToPrompt::End));
    }
}
