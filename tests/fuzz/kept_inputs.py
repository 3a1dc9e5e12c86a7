"""Inputs that were once a traceback, a hang or a message of megabytes; the fuzz tests run them first."""

import json

DIGITS = "1" * 5000


def bomb(levels: int, inside: str = "") -> str:
    """Return a YAML of lists that name the one above ten times."""
    lines = [f"{inside}a0: &a0 [x, x]"]
    lines += [f"{inside}a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, levels)]
    return "\n".join(lines)


CONFIGS = [
    "/* {",
    '{"\\u-fff": 1}',
    f'{{"seed": {DIGITS}}}',
    '{"seed": 1e999}',
    '{"optimizer": {"type": "Adam", "params": {"lr": -1e999}}}',
    "[" * 5000,
    '{"a":' * 5000,
    '{"optimizer": {"type": "A", "params": ' + '{"a":' * 200 + "1" + "}" * 202,
    "'''",
    json.dumps({f"k{k}": 1 for k in range(50_000)}),
    json.dumps({"pipeline": {"partition": ["x"] * 20_000}}),
    '{"' + "k" * 1_000_000 + '": 1}',
    "{a: n" + "," * 200_000,
    '{"train_batch_size": 1000000000000000003, "train_micro_batch_size_per_gpu": 500000000000000000}',
    *(json.dumps({section: "auto"}) for section in ("fp16", "optimizer", "pipeline", "zero_optimization", "wandb")),
]
YAMLS = [
    "a: &a [*a]",
    "&a {seed: *a}",
    "optimizer: &a {type: Adam, params: *a}",
    bomb(12),
    "optimizer:\n  type: Adam\n  params:\n" + bomb(8, "    "),
    "a0: &a0 {x: 1}\n" + "\n".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 10)}]}}" for k in range(1, 9)),
    "seed: !!int ''",
    "seed: !!timestamp x",
    "seed: !!bool x",
    "seed: 0x" + "f" * 5000,
    "seed: " + DIGITS,
    "seed: 1" + ":1" * 5000,
    "seed: 1e999",
    "[" * 5000,
    "- " * 5000,
    "? " * 5000,
    "<<: 1",
    "? [a]\n: 1",
    "? {a: 1}\n: 1",
    "1: 2",
    "seed: 2026-13-45",
    "%YAML 9.9\n---\na: 1",
    f"%YAML {DIGITS}",
    "a: 1\n---\nb: 1",
    "{" + "k: [" * 300,
]
LAYOUTS = ["", "pp" + DIGITS, "pp999999999999", "pp1" * 100_000, "," * 100_000, "x" * 1_000_000, "pp²", "zero7"]
HOSTS = {"hosts": [{"machine": "8xH100", "count": 2}]}
CLUSTERS = [
    "[]",
    "{}",
    json.dumps({"hosts": [{"machine": "8xH100", "count": 10**9}]}),
    json.dumps({"hosts": [{"machine": "99999999xH100"}]}),
    json.dumps({"hosts": [{"gpus": [{"device": "H100", "count": 10**9}]}]}),
    json.dumps({"hosts": [{"machine": "8xH100", "nics": [{"bandwidth": 1, "count": 10**9}]}]}),
    json.dumps({**HOSTS, "switches": [{"name": "s", "count": 10**9}]}),
    json.dumps({"hosts": [{"machine": "8xH100", "name": "a" + DIGITS}]}),
    json.dumps({"hosts": [{"machine": "8xH100", "name": "a" * 100_000}]}),
    json.dumps({"hosts": [{}] * 20_000}),
    json.dumps({**HOSTS, "name": "é" * 100_000, "overlap": float("inf")}),
    json.dumps({**HOSTS, "links": [{"between": ["*", "*"], "bandwidth": 1}] * 3000}),
    json.dumps({"hosts": [{"machine": "8xH100", "count": 100}], "links": [{"between": ["*", "*"], "bandwidth": 1}]}),
    json.dumps({**HOSTS, "devices": {"mine": {"base": None}}}),
]
SHORT_FORMS = [
    "99999999x8xH100", "1x99999999xH100", DIGITS + "xH100", "8x" + DIGITS + "xH100", "0xH100", "8x" + "h" * 100_000,
]  # fmt: skip
HUGGING_FACE = [
    *("", "[]", "null", "1", '"a"', "{", "[" * 100_000, f'{{"vocab_size": {DIGITS}}}', "NaN", "\ud800"),
    '{"architectures": 1}',
    '{"architectures": {"a": 1}}',
    '{"architectures": [[]]}',
    '{"model_type": []}',
    '{"model_type": "gpt2", "vocab_size": 16, "n_head": 0}',
    '{"model_type": "gpt2", "vocab_size": 16, "n_head": -1}',
    '{"model_type": "gpt2", "vocab_size": 16, "n_layer": 1000000000}',
    '{"model_type": "gpt2", "vocab_size": 16, "activation_function": []}',
    '{"model_type": "gpt2", "vocab_size": 16, "attn_pdrop": 2.0}',
    '{"model_type": "gpt2", "vocab_size": -1}',
]
INDICES = [
    "",
    "[]",
    "{}",
    '{"weight_map": []}',
    '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a": "../one.safetensors"}}',
    '{"weight_map": {"a": "/etc/passwd"}}',
    '{"weight_map": {"a": "\\u0000"}}',
    '{"weight_map": {"a": ".."}}',
    '{"weight_map": {"a": ""}}',
    json.dumps({"weight_map": {"a": "a" * 3000}}),
    '{"weight_map": {}}',
    *('{"weight_map": [' + f"{one}, " * 3_000_000 + one + "]}" for one in ("1", '""', "{}")),
    "[" * 100_000,
]
