"""Writes a GGUF file anew in another type: python make_gguf.py SOURCE OUTPUT bfloat16|float32.

llama.cpp's own converter dequantises every tensor in float32 and rounds once; norms stay float32.
"""

import sys

import llama_cpp

TYPES = {"float32": llama_cpp.LLAMA_FTYPE_ALL_F32, "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16}


def main(source: str, output: str, dtype: str) -> None:
    """One file from another."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = TYPES[dtype]
    settings.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), output.encode(), settings):
        raise SystemExit(f"llama.cpp could not write {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
