"""Compiles the kernels exactly as the launchers would, for a GPU that need not be there; prints what the compiler made.

Run by test_compiled.py in a process of its own, since Triton decides at import whether it compiles or interprets:
    python tests/compile_kernels.py 90 bfloat16/identity bfloat16/gelu ...
Prints a JSON object: case -> {"forward": facts, "backward": facts}.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import xfused
import xfused.ops.bias_act_dropout as op

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


def recorded(launcher, *args):
    """(kernel, arguments, constants, warps, registers by capability) of the one launch that `launcher(*args)` makes."""
    launches = []
    op.launch = lambda kernel, grid, *launch: launches.append((kernel, *launch))
    op.has_ptx = lambda device: True
    launcher(*args)
    (launch,) = launches
    return launch


def disassembled(capability, kernel, args, constants, warps, registers):
    """(instructions as (address, text), resource usage line) of the kernel for that compute capability."""
    signature, constexprs, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if position >= len(args):
            signature[name], constexprs[name] = "constexpr", constants[position - len(args)]
        elif args[position] is None:
            signature[name], constexprs[name] = "constexpr", None
        else:
            value = args[position]
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype] if is_tensor else parameter.annotation_type
            if is_tensor or (not parameter.do_not_specialize and isinstance(value, int) and value % 16 == 0):
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    if limit := registers.get(capability // 10):
        options["maxnreg"] = limit
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        sass = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    instructions = [(int(a, 16), t) for a, t in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)]
    return instructions, re.search(r"REG:.*", usage.stdout + usage.stderr).group(0)


def longest_loop(instructions):
    """The instructions of the longest backward branch's range."""
    loops = [[]]
    for address, text in instructions:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target.group(1), 16) < address:
            loops.append([i for i in instructions if int(target.group(1), 16) <= i[0] <= address])
    return max(loops, key=len)


def facts(capability, kernel, args, constants, warps, registers):
    instructions, usage = disassembled(capability, kernel, args, constants, warps, registers)
    named = dict(zip([p.name for p in kernel.params[len(args) :]], constants, strict=True))
    a_thread = 8 * named["BLOCK_G"] * named["BLOCK_N"] / (32 * warps)
    loop = longest_loop(instructions)
    body = loop or instructions

    def opcodes(listing):
        return [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for _, text in listing]

    return {
        "instructions_per_element": len([name for name in opcodes(body) if name != "NOP"]) / a_thread,
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "local": int(re.search(r"LOCAL:(\d+)", usage).group(1)),
        "shared": int(re.search(r"SHARED:(\d+)", usage).group(1)),
        "opcodes": dict(collections.Counter(opcodes(body))),
        "looped": bool(loop),
    }


def main(capability, cases):
    result = {}
    for case in cases:
        dtype_name, activation = case.split("/")
        dtype = getattr(torch, dtype_name)
        x = torch.empty(1024, 1024, dtype=dtype)
        bias, seed = torch.empty(1024, dtype=dtype), torch.tensor([3, 4])
        options = (activation, list(xfused.activation(activation).parameters), 0.1, 0, 0)
        saved = None if activation == "identity" else x
        result[case] = {
            "forward": facts(capability, *recorded(op.launch_forward, x, bias, seed, *options)),
            "backward": facts(capability, *recorded(op.launch_backward, x, saved, bias, seed, *options)),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
