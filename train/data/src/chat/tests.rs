use super::*;
use std::time::{Duration, Instant};

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(n, t)| (n.to_owned(), t.to_owned()));
    ChatTemplate::new(source.to_owned(), tokens.into(), "t.jinja".into()).unwrap()
}

fn chat() -> Vec<Message> {
    vec![Message::new("user", " Hi 'you' "), Message::new("assistant", "Hé\n")]
}

fn render(source: &str) -> String {
    template(source).render(&chat(), false).unwrap()
}

#[test]
fn constructs_of_python_work() {
    for (source, expected) in [
        ("{{ bos_token }}{{ pad_token }}|{{ messages|length }}", "<s>|2"),
        (
            "{{ none }} {{ true }} {{ 1 == 2 }} {{ tools is none }} {{ documents is not none }}",
            "None True False True False",
        ),
        (
            "{{ messages[0]['content'].strip() }}|{{ messages[0].content.replace('Hi', 'Ho').lstrip() }}",
            "Hi 'you'|Ho 'you' ",
        ),
        ("{{ messages[0].content.startswith(' Hi') }} {{ 'a</t>b'.split('</t>')[-1] }}", "True b"),
        ("{% for m in messages[::-1] %}{{ m.role }}{{ loop.index0 }} {% endfor %}", "assistant0 user1 "),
        (
            "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}{% endif %}\n{{ m.role }}{{ loop.previtem.role }}\n{% endfor %}\n",
            "assistantuser\n",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% break %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        ("{{ {'b': [1, 'é<'], 'a': none}|tojson }}", r#"{"b": [1, "é<"], "a": null}"#),
        ("{{ {'b': [1]}|tojson(indent=2) }}", "{\n  \"b\": [\n    1\n  ]\n}"),
        ("{{ messages[0]|tojson }}", r#"{"role": "user", "content": " Hi 'you' "}"#),
        (
            "{{ messages[0].tool_calls is defined }} {{ 'x' in messages[0] }} {{ messages[0] is mapping }} {{ 'a' is string }}",
            "False False True True",
        ),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{{ '%s-%s' | format('a', 1) }}{{ 'a' ~ 1 ~ ['x', 'y'] | join(',') }}", "a-1a1x,y"),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}

#[test]
fn generation_blocks_are_ranges() {
    let source = "{% for m in messages %}\n{{ m.role }}:\n{%- if m.role == 'assistant' %}\n{%- generation -%} {{ m.content }}</s>\n  {% endgeneration %}\n{% endif %}{% endfor %}";
    let template = template(source);
    assert!(template.has_generation());
    let rendered = template.render_marked(&chat(), &[(2, false)]).unwrap().remove(0);
    let parts: Vec<_> = rendered.generation.iter().map(|range| &rendered.text[range.clone()]).collect();
    assert_eq!(parts, ["Hé\n</s>\n"]);
    assert_eq!(rendered.text, "user:assistant:Hé\n</s>\n");
}

#[test]
fn refusals_name_the_file_and_the_line() {
    let message = |source: &str| template(source).render(&chat(), false).unwrap_err().to_string();
    assert_eq!(
        message("\n{{ raise_exception('no user') }}"),
        "the chat template of t.jinja: no user (line 2 of the template)"
    );
    assert!(message("{{ messages[0].x.y }}").contains("undefined value"));
    assert!(message("{{ f() }}").contains("f is unknown"), "{}", message("{{ f() }}"));
    let invalid = ChatTemplate::new("{% if %}".to_owned(), BTreeMap::new(), "t.jinja".into());
    assert!(invalid.unwrap_err().to_string().contains("line 1 of the template"));
}

#[test]
fn hostile_templates_end() {
    let message = |source: &str| match template(source).render(&chat(), false) {
        Ok(text) => panic!("{} bytes of {source}", text.len()),
        Err(error) => error.to_string(),
    };
    for (source, expected) in [
        ("{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}", "instructions"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for a in range(9999) %}{{ 'x' * 100000 }}{% endfor %}", "instructions"),
        ("{{ range(1000000000000)|list }}", ""),
        (
            "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "instructions",
        ),
        ("{% set s = 'x' * 10000000 %}{{ s.replace('x', s) }}", "instructions"),
        ("{% set s = 'x' * 10000000 %}{{ s|replace('x', s) }}", "instructions"),
        ("{% set s = 'x' * 10000000 %}{{ s.join(s) }}", "instructions"),
        ("{{ '{:>10000000000}'.format('x') }}", "too wide"),
        ("{{ '%10000000000s'|format('x') }}", "too wide"),
        ("{{ 'x'|indent(10000000000, true) }}", ""),
        ("{{ '{}'.format('x')|center(10000000000) }}", ""),
    ] {
        let start = Instant::now();
        let message = message(source);
        assert!(message.contains(expected), "{message}");
        assert!(start.elapsed() < Duration::from_secs(60), "{source}");
    }
}

#[test]
fn templates_come_from_a_model_folder() {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, content: &str| std::fs::write(folder.path().join(file), content).unwrap();
    let load = || ChatTemplate::load(folder.path());
    assert!(matches!(load(), Err(DataError::NoChatTemplate { .. })));
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>", "pad_token": null}"#,
    );
    assert!(matches!(load(), Err(DataError::NoChatTemplate { .. })));
    let text = || load().unwrap().render(&[], false).unwrap();
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}1"}"#,
    );
    assert_eq!(text(), "<b>1");
    let named =
        r#"[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ eos_token }}2"}]"#;
    write("tokenizer_config.json", &format!(r#"{{"eos_token": "<e>", "chat_template": {named}}}"#));
    assert_eq!(text(), "<e>2");
    write("chat_template.jinja", "{{ eos_token }}3\n");
    assert_eq!(text(), "<e>3");
    assert_eq!(
        ChatTemplate::load(folder.path().join("chat_template.jinja")).unwrap().token("eos_token"),
        Some("<e>")
    );
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    write("tokenizer_config.json", r#"{"chat_template": 7}"#);
    assert!(load().unwrap_err().to_string().contains("chat_template is neither"));
}
