//! Planned failures: calls that return a code, and operations that fail when they execute. Also
//! counts the calls of each function.

use std::collections::HashMap;

use crate::operation::Kind;
use crate::status::{Answer, Status};

struct CallFault {
    function: String,
    /// The number of calls until the failure; 1 is the next.
    left: u64,
    status: Status,
}

struct OperationFault {
    /// Only operations of this kind count; 0 counts all.
    kind: u32,
    left: u64,
    status: Status,
}

#[derive(Default)]
pub(crate) struct Faults {
    calls: HashMap<String, u64>,
    call_faults: Vec<CallFault>,
    operation_faults: Vec<OperationFault>,
}

impl Faults {
    pub(crate) fn fail_call(&mut self, function: &str, nth: u64, status: Status) {
        let function = function.to_owned();
        self.call_faults.push(CallFault {
            function,
            left: nth,
            status,
        });
    }

    pub(crate) fn fail_operation(&mut self, kind: u32, nth: u64, status: Status) {
        self.operation_faults.push(OperationFault {
            kind,
            left: nth,
            status,
        });
    }

    /// Removes the planned failures that have not occurred.
    pub(crate) fn clear(&mut self) {
        self.call_faults.clear();
        self.operation_faults.clear();
    }

    /// Counts a call; returns its planned failure, if any.
    pub(crate) fn call(&mut self, function: &'static str) -> Answer {
        match self.calls.get_mut(function) {
            Some(count) => *count += 1,
            None => _ = self.calls.insert(function.to_owned(), 1),
        }
        let mut outcome = Ok(());
        self.call_faults.retain_mut(|fault| {
            if fault.function != function {
                return true;
            }
            fault.left = fault.left.saturating_sub(1);
            if fault.left == 0 {
                outcome = Err(fault.status);
            }
            fault.left > 0
        });
        outcome
    }

    /// Counts an operation that begins; returns its planned failure, if any.
    pub(crate) fn operation(&mut self, kind: Kind) -> Answer {
        let mut outcome = Ok(());
        self.operation_faults.retain_mut(|fault| {
            if fault.kind != 0 && fault.kind != kind as u32 {
                return true;
            }
            fault.left = fault.left.saturating_sub(1);
            if fault.left == 0 {
                outcome = Err(fault.status);
            }
            fault.left > 0
        });
        outcome
    }

    /// The number of calls of a function, failed ones included.
    pub(crate) fn calls(&self, function: &str) -> u64 {
        self.calls.get(function).copied().unwrap_or_default()
    }
}
