//! Reports as dictionaries; `penstock.reports` gives them types.

use std::path::Path;

use penstock_store::care::salvage::SalvageReport;
use penstock_store::care::survey::{Described, Survey};
use penstock_store::format::part::{Missing, MissingKind};
use penstock_store::report::{Fallback, LoadReport, Problem, SaveReport, Transport, VerifyReport};
use penstock_store::save::{Committed, Written};
use penstock_store::steps::scrub::{Outcome, ScrubReport};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::rows::{MissingTensor, SurveyedTensor};

pub(crate) fn of_save<'py>(py: Python<'py>, report: &SaveReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", report.path.as_os_str())?;
    dict.set_item("step", report.step)?;
    dict.set_item("checkpoint_id", &report.id)?;
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("tensor_bytes", report.tensor_bytes)?;
    dict.set_item("linked_bytes", report.linked_bytes)?;
    dict.set_item("device_bytes", report.device_bytes)?;
    dict.set_item("zero_copy_bytes", report.zero_copy_bytes)?;
    dict.set_item("sealed_bytes", report.sealed_bytes)?;
    dict.set_item("tensors", report.tensors)?;
    dict.set_item("files", report.files)?;
    dict.set_item("seconds", report.seconds)?;
    set_phases(&dict, &report.phases)?;
    set_transport(&dict, &report.transport)?;
    Ok(dict)
}

/// The report of one rank's write, with its vote.
pub(crate) fn of_written<'py>(
    py: Python<'py>,
    path: &Path,
    written: &Written,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", path.as_os_str())?;
    dict.set_item("bytes", written.bytes)?;
    dict.set_item("tensor_bytes", written.tensor_bytes)?;
    dict.set_item("linked_bytes", written.linked_bytes)?;
    dict.set_item("device_bytes", written.device_bytes)?;
    dict.set_item("zero_copy_bytes", written.zero_copy_bytes)?;
    dict.set_item("sealed_bytes", written.sealed_bytes)?;
    dict.set_item("tensors", written.tensors)?;
    dict.set_item("files", written.files)?;
    set_phases(&dict, &written.phases)?;
    set_transport(&dict, &written.transport)?;
    let part = &written.part;
    let vote = (&part.file, part.bytes, part.digest.0);
    match part.sha256 {
        None => dict.set_item("vote", vote)?,
        Some(sha256) => {
            dict.set_item("vote", (vote.0, vote.1, vote.2, sha256.to_string()))?;
        }
    }
    Ok(dict)
}

pub(crate) fn of_commit<'py>(
    py: Python<'py>,
    committed: &Committed,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("checkpoint_id", &committed.id)?;
    dict.set_item("manifest_bytes", committed.manifest_bytes)?;
    dict.set_item("left_behind", &committed.left_behind)?;
    dict.set_item("unindexed", &committed.unindexed)?;
    Ok(dict)
}

pub(crate) fn of_load<'py>(py: Python<'py>, report: &LoadReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("bytes_read", report.bytes_read)?;
    dict.set_item("bounced_bytes", report.bounced_bytes)?;
    dict.set_item("opened_bytes", report.opened_bytes)?;
    dict.set_item("device_bytes", report.device_bytes)?;
    dict.set_item("tensors", report.tensors)?;
    dict.set_item("files", report.files)?;
    dict.set_item("seconds", report.seconds)?;
    let phases = PyDict::new(py);
    phases.set_item("read", report.seconds)?;
    dict.set_item("phases", phases)?;
    dict.set_item("verified", report.verified)?;
    set_transport(&dict, &report.transport)?;
    Ok(dict)
}

pub(crate) fn of_verify<'py>(
    py: Python<'py>,
    report: &VerifyReport,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("ok", report.problems.is_empty())?;
    dict.set_item("problems", problems(py, &report.problems)?)?;
    dict.set_item("bytes_checked", report.bytes_checked)?;
    dict.set_item("files", report.files)?;
    dict.set_item("tensors", report.tensors)?;
    dict.set_item("is_partial", report.is_partial)?;
    dict.set_item("is_sealed", report.is_sealed)?;
    dict.set_item("signer", &report.signer)?;
    dict.set_item("seconds", report.seconds)?;
    Ok(dict)
}

pub(crate) fn of_scrub<'py>(py: Python<'py>, report: &ScrubReport) -> PyResult<Bound<'py, PyDict>> {
    let steps = PyList::empty(py);
    for scrubbed in &report.steps {
        let outcome = match scrubbed.outcome {
            Outcome::Verified => "verified",
            Outcome::Skipped => "skipped",
            Outcome::Damaged => "damaged",
            Outcome::Failed => "failed",
        };
        let entry = PyDict::new(py);
        entry.set_item("step", scrubbed.step)?;
        entry.set_item("state", outcome)?;
        entry.set_item("reason", &scrubbed.reason)?;
        entry.set_item("read_at_seconds", scrubbed.read_at_seconds)?;
        entry.set_item("problems", problems(py, &scrubbed.problems)?)?;
        entry.set_item("bytes_checked", scrubbed.bytes_checked)?;
        entry.set_item("seconds", scrubbed.seconds)?;
        steps.append(entry)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("steps", steps)?;
    dict.set_item("seconds", report.seconds)?;
    Ok(dict)
}

pub(crate) fn of_survey<'py>(py: Python<'py>, survey: &Survey) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("described_by", described_by(survey.described))?;
    let by_rank = survey.described_by().into_iter().map(described_by);
    dict.set_item("ranks", by_rank.collect::<Vec<_>>())?;
    let manifest = survey.manifest.as_ref();
    dict.set_item("step", manifest.and_then(|manifest| manifest.step))?;
    dict.set_item("tensors", fates(py, survey)?)?;
    dict.set_item("missing_files", &survey.missing_files)?;
    dict.set_item("problems", problems(py, &survey.problems)?)?;
    dict.set_item("bytes_checked", survey.bytes_checked)?;
    dict.set_item("seconds", survey.seconds)?;
    Ok(dict)
}

fn described_by(described: Described) -> &'static str {
    match described {
        Described::Whole => "whole",
        Described::PartAlone => "part",
        Described::Headers => "headers",
    }
}

/// All tensors; those shared by ranks come first.
fn fates(py: Python<'_>, survey: &Survey) -> PyResult<Vec<SurveyedTensor>> {
    let mut fates = Vec::new();
    for tensor in &survey.shared {
        fates.push(SurveyedTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: PyTuple::new(py, &tensor.shape)?.unbind(),
            bytes: tensor.bytes,
            hit: tensor.hit.clone(),
            rank: None,
            is_vouched_for: tensor.is_vouched_for,
        });
    }
    let several = survey.world_size() > 1;
    let entries = survey.part.tensors.iter().zip(&survey.hits).enumerate();
    for (entry, (tensor, hit)) in entries.filter(|(_, (tensor, _))| tensor.region.is_none()) {
        fates.push(SurveyedTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: PyTuple::new(py, &tensor.shape)?.unbind(),
            bytes: tensor.nbytes(),
            hit: hit.clone(),
            rank: several.then(|| survey.rank_of(entry)),
            is_vouched_for: survey.is_vouched_for(entry),
        });
    }
    Ok(fates)
}

pub(crate) fn of_salvage<'py>(
    py: Python<'py>,
    report: &SalvageReport,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("step", report.step)?;
    dict.set_item("checkpoint_id", &report.id)?;
    dict.set_item("source_id", &report.source)?;
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("tensors", report.tensors)?;
    dict.set_item("tensor_bytes", report.recovered_bytes)?;
    let missing = report
        .missing
        .iter()
        .map(|(rank, missing)| (*rank, missing));
    dict.set_item("missing", missing_rows(py, missing.collect())?)?;
    dict.set_item("files_lost", &report.files_lost)?;
    dict.set_item("unverified", report.unverified)?;
    dict.set_item("ranks_lost", &report.ranks_lost)?;
    dict.set_item("seconds", report.seconds)?;
    Ok(dict)
}

pub(crate) fn missing_rows(
    py: Python<'_>,
    missing: Vec<(Option<u32>, &Missing)>,
) -> PyResult<Vec<MissingTensor>> {
    let row = |(rank, missing): (Option<u32>, &Missing)| {
        let shape = PyTuple::new(py, &missing.shape)?.unbind();
        let kind = match missing.kind {
            MissingKind::Own => "own",
            MissingKind::Shared => "shared",
            MissingKind::State => "state",
        };
        let Missing {
            name,
            dtype,
            reason,
            ..
        } = missing.clone();
        Ok(MissingTensor {
            name,
            dtype,
            shape,
            reason,
            kind,
            rank,
        })
    };
    missing.into_iter().map(row).collect()
}

fn problems<'py>(py: Python<'py>, found: &[Problem]) -> PyResult<Bound<'py, PyList>> {
    let problems = PyList::empty(py);
    for problem in found {
        let entry = PyDict::new(py);
        entry.set_item("file", &problem.file)?;
        entry.set_item("offset", problem.offset)?;
        entry.set_item("tensor", &problem.tensor)?;
        entry.set_item("message", &problem.detail)?;
        entry.set_item("is_proven", problem.is_proven)?;
        problems.append(entry)?;
    }
    Ok(problems)
}

fn set_phases(dict: &Bound<'_, PyDict>, measured: &[(&'static str, f64)]) -> PyResult<()> {
    let phases = PyDict::new(dict.py());
    for (phase, seconds) in measured {
        phases.set_item(phase, seconds)?;
    }
    dict.set_item("phases", phases)
}

/// Each as a `penstock.reports.Fallback` with its reason and kind.
fn fallbacks<'py>(py: Python<'py>, found: &[Fallback]) -> PyResult<Bound<'py, PyList>> {
    let class = py.import("penstock.reports")?.getattr("Fallback")?;
    let of = |fallback: &Fallback| class.call1((&fallback.reason, fallback.kind.name()));
    let made: PyResult<Vec<_>> = found.iter().map(of).collect();
    PyList::new(py, made?)
}

fn set_transport(dict: &Bound<'_, PyDict>, transport: &Transport) -> PyResult<()> {
    dict.set_item("engine", &transport.engine)?;
    dict.set_item("engine_setup", &transport.engine_setup)?;
    dict.set_item("direct_io", transport.direct_io)?;
    dict.set_item("fallbacks", fallbacks(dict.py(), &transport.fallbacks)?)?;
    dict.set_item("choices", &transport.choices)?;
    dict.set_item("device", &transport.device)?;
    dict.set_item("io_threads", transport.io_threads)?;
    dict.set_item("queue_depth", transport.queue_depth)?;
    dict.set_item("extent_bytes", transport.extent_bytes)?;
    dict.set_item("staging_peak_bytes", transport.staging_peak_bytes)
}
