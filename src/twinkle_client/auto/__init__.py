"""``twinkle-auto``: an agent that starts and watches training scripts. A person confirms whatever it runs or stops.

runtime   what a training script records about itself: used by scripts
runs      the folders of runs, and the processes of their scripts
chat      a model behind OpenAI's protocol, streamed
tools     what the model may ask for
agent     the loop of questions, tool calls and answers
cli       the command's options
"""

__all__: list[str] = []
