"""Fine-tuning of a causal language model of Hugging Face on text files, with pipeline stages, tensor parallelism and replicas.

It trains all weights or LoRA adapters alone (--lora RANK), on documents packed into rows of --seq tokens in which they don't
attend to each other, generates text, and saves weights or adapters for from_pretrained. A file is a document. Without --model
a tokenizer is trained on the text and a small Llama is begun: nothing is downloaded.
It needs transformers and PEFT: pip install ".[huggingface]".

parallel3d --num_procs pp2,dp2 examples/finetune_hf.py --layout pp2,dp2         # a small new Llama, on the CPU
parallel3d --num_procs pp2,dp2 examples/finetune_hf.py --layout pp2,dp2 --lora 8 --out runs/adapters  # adapters alone
hf download Qwen/Qwen2.5-0.5B
parallel3d --num_gpus 4 examples/finetune_hf.py --layout pp2,dp2,zero1 --model Qwen/Qwen2.5-0.5B --text docs
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import parallel3d
from parallel3d import models
from parallel3d.config import Layout, parse_layout
from parallel3d.pipe import PipelineModule

END = "<|end|>"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory or a name on the hub; default: a small new Llama")
    parser.add_argument("--text", help="a directory of text files; default: modules of Python's standard library")
    parser.add_argument("--layout", default="pp1", help="such as pp2,tp2,dp2,zero1")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank alone")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq", type=int, default=128, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=16, help="rows a step, over all replicas")
    parser.add_argument("--micro_batch", type=int, default=2, help="rows a micro-batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--prompt", default="def ", help="how the generated text begins")
    parser.add_argument("--out", default="runs/finetuned", help="directory for the result; new or empty")
    args = parser.parse_args()
    if Path(args.out).is_dir() and any(Path(args.out).iterdir()):  # told now, not after the training
        sys.exit(f"--out {args.out} is not empty; remove it or choose another directory")
    return args


def read_documents(directory: str | None) -> list[str]:
    if directory is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    else:
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def make_model(directory: Path, documents: list[str]) -> None:
    """Save a byte-level tokenizer, trained on the documents, and a new Llama."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        documents, BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), num_attention_heads=4, max_position_embeddings=512, **sizes
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def make_config(args: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    return {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": args.steps // 10, "total_num_steps": args.steps, "warmup_max_lr": args.lr},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": torch.cuda.is_available()},
        "zero_optimization": {"stage": layout.zero or 0},
        "tensor_parallel": {"size": layout.tensor_ranks, "sequence_parallel": layout.sequence_parallel},
        # Layers of transformers get a mask only where it masks something: shapes differ.
        "pipeline": {"stages": layout.stages, "shapes": "dynamic"},
        "dataloader_shuffle": True,
        "steps_per_print": None,
    }


def main() -> None:
    args = parse_arguments()
    parallel3d.init_distributed()
    rank, documents = parallel3d.comm.get_rank(), read_documents(args.text)
    source = args.model or str(Path(args.out).with_name("base"))
    if args.model is None and rank == 0:
        make_model(Path(source), documents)
    parallel3d.comm.barrier()
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = list(
        models.PackedDocuments(
            [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in documents], args.seq
        )
    )

    model: Any = source
    if args.lora:
        lora = LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), lora)
    try:
        config = make_config(args, parse_layout(args.layout))
        module = PipelineModule(models.from_hf(model), loss_fn=models.CausalLMLoss(per_token=True), config=config)
    except parallel3d.Parallel3DError as error:  # of the options: a traceback would tell no more
        sys.exit(str(error))
    engine, *_ = parallel3d.initialize(model=module, config=config, training_data=rows)
    for step in range(1, args.steps + 1):
        loss = float(engine.train_batch())
        if rank == 0 and (step % 10 == 0 or step == 1):
            print(f"step {step}: loss {loss:.3f}")

    prompt = tokenizer([args.prompt], return_tensors="pt")["input_ids"]
    text = engine.generate(
        prompt, max_new_tokens=40, do_sample=True, top_p=0.9, eos_token_id=tokenizer.eos_token_id, seed=0
    )
    models.save_hf(engine, args.out)
    if rank == 0:
        tokenizer.save_pretrained(args.out)
        print(f"saved {'adapters' if args.lora else 'the model'} to {args.out}; a sample:")
        print(tokenizer.decode(text[0]))
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
