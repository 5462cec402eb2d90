use super::error::EnvError;
use super::vars::Vars;

const NODE_LISTS: &[&str] = &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];

pub(super) fn first_host(vars: &Vars) -> Result<Option<String>, EnvError> {
    let Some(list) = vars.first(NODE_LISTS)? else { return Ok(None) };
    let wrong = |problem| list.wrong(format!("{problem}; it should read like gpu[01-03,7],login-2"));
    first_of(&list.value).map(Some).map_err(wrong)
}

/// Returns the first host of a list such as `rack[1-2]n[01-16],login-2`: here `rack1n01`. Does not expand the list,
/// because a few bytes can stand for more hosts than fit in memory.
pub(super) fn first_of(list: &str) -> Result<String, &'static str> {
    let (mut host, mut rest) = (String::new(), list.trim());
    while let Some((literal, after)) = rest.split_once('[').filter(|(literal, _)| !literal.contains(',')) {
        let (ranges, after) = after.split_once(']').ok_or("a bracket that is not closed")?;
        let index = ranges.split([',', '-']).next().unwrap_or_default();
        if index.is_empty() || !index.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err("an index in brackets that is not a number");
        }
        host.push_str(literal);
        host.push_str(index);
        rest = after;
    }
    host.push_str(rest.split(',').next().unwrap_or_default());
    let is_legal = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    if host.is_empty() || host.len() > 253 || !is_legal { Err("an invalid host name") } else { Ok(host) }
}
