//! Modules and the functions in them. Only the names of the entries in a module's PTX are used.

use std::collections::{BTreeMap, HashMap};

use crate::kernel::Kernel;
use crate::kernels::KERNELS;
use crate::status::{Answer, Status};

struct Module {
    context: u64,
    kernels: Vec<&'static Kernel>,
}

#[derive(Clone, Copy)]
pub(crate) struct Function {
    module: u64,
    pub(crate) context: u64,
    pub(crate) kernel: &'static Kernel,
}

#[derive(Default)]
pub(crate) struct Modules {
    modules: BTreeMap<u64, Module>,
    functions: HashMap<u64, Function>,
}

impl Modules {
    /// Loads the entries of a text.
    pub(crate) fn load(&mut self, id: u64, context: u64, text: &str) -> Answer {
        let entries: Vec<&str> = text
            .split(".entry")
            .skip(1)
            .filter_map(entry_name)
            .collect();
        if entries.is_empty() {
            return Err(Status::INVALID_PTX);
        }
        let known = KERNELS
            .iter()
            .filter(|kernel| entries.contains(&kernel.name));
        self.modules.insert(
            id,
            Module {
                context,
                kernels: known.collect(),
            },
        );
        Ok(())
    }

    pub(crate) fn unload(&mut self, id: u64) -> Answer {
        self.modules.remove(&id).ok_or(Status::INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != id);
        Ok(())
    }

    /// The handle of a module's entry with a known kernel: the same at each call.
    pub(crate) fn function(&mut self, id: u64, module: u64, name: &str) -> Answer<u64> {
        let found = self.modules.get(&module).ok_or(Status::INVALID_HANDLE)?;
        let kernel = found.kernels.iter().find(|kernel| kernel.name == name);
        let kernel = *kernel.ok_or(Status::NOT_FOUND)?;
        let mut functions = self.functions.iter();
        let known = functions
            .find(|(_, function)| function.module == module && function.kernel.name == name);
        if let Some((known, _)) = known {
            return Ok(*known);
        }
        self.functions.insert(
            id,
            Function {
                module,
                context: found.context,
                kernel,
            },
        );
        Ok(id)
    }

    pub(crate) fn get(&self, function: u64) -> Answer<Function> {
        self.functions
            .get(&function)
            .copied()
            .ok_or(Status::INVALID_HANDLE)
    }

    pub(crate) fn remove_context(&mut self, context: u64) {
        self.modules.retain(|_, module| module.context != context);
        self.functions
            .retain(|_, function| function.context != context);
    }

    pub(crate) fn count(&self) -> u64 {
        self.modules.len() as u64
    }
}

/// The name after `.entry`.
fn entry_name(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$');
    let name = &text[..end.unwrap_or(text.len())];
    (!name.is_empty()).then_some(name)
}
