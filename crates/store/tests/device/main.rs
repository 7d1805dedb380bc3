//! Checkpoints of tensors on devices.

#[path = "../common/mod.rs"]
mod common;
mod loads;
mod saves;

/// Runs an ignored test in a separate process; returns its output.
#[track_caller]
fn text_of(child: &str, environment: &[(&str, &str)]) -> String {
    let executable = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(executable);
    command.args(["--exact", child, "--ignored", "--nocapture"]);
    command.envs(environment.iter().copied());
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{text}");
    text
}
