"""Exports an OpenVINO model from a Hugging Face checkpoint: python export_openvino.py CHECKPOINT OUTPUT plain|int8.

`int8` keeps weights as 8-bit integers (optimum-intel's own default recipe); activations stay as they are.
"""

import sys

from openvino import save_model
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main(checkpoint: str, output: str, kind: str) -> None:
    """Model and tokenizer, as openvino-genai wants them."""
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=kind == "int8")
    model.save_pretrained(output)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    save_model(tokenizer, f"{output}/openvino_tokenizer.xml")
    save_model(detokenizer, f"{output}/openvino_detokenizer.xml")


if __name__ == "__main__":
    main(*sys.argv[1:])
