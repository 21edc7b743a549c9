"""Text from the embedded model: several prompts in one continuous batch, one answer streamed, one chat.

Run it with python examples/generate.py.
"""

from batchwright import Engine, SamplingParams

engine = Engine("smollm2")
params = SamplingParams(max_tokens=24)

prompts = ["The capital of France is", "A batch is", "Water boils at"]
for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
    print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")

for output in engine.stream(["Once upon a time"], SamplingParams(max_tokens=24, temperature=0.8, seed=7)):
    print(output.text, end="", flush=True)
print()

answer = engine.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(max_tokens=48))
print(answer.text)
