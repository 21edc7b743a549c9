"""Text from the embedded model: several prompts in one continuous batch, one answer streamed, one chat, one form.

Run it with python examples/generate.py.
"""

from batchwright import Constraint, Engine, SamplingParams

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

question = {"role": "user", "content": "When did people first land on the moon? Answer with a date."}
date = SamplingParams(max_tokens=16, constraint=Constraint.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
print(engine.chat([question], date).text)
