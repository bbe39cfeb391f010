"""Ask about a picture: drawn here, sent as a data URL, with the openai package.

Run `plait serve` first, then: python examples/image_client.py [FILE]
Prints what the model sees in a PNG, JPEG, WebP or GIF file, by default in two blue circles.
"""

import base64
import io
import sys
from pathlib import Path

from openai import OpenAI
from PIL import Image, ImageDraw


def drawn() -> bytes:
    image = Image.new("RGB", (96, 96), (240, 236, 236))
    for x, y in ((12, 36), (60, 60)):
        ImageDraw.Draw(image).ellipse((x - 9, y - 9, x + 9, y + 9), fill=(38, 84, 214))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


picture = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else drawn()
url = "data:image/png;base64," + base64.b64encode(picture).decode()  # the real type is looked for
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.create(
    model="sight",  # the adapter that reads what the vision tower sees
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is in the picture?"},
                {"type": "image_url", "image_url": {"url": url}},
            ],
        }
    ],
    temperature=0,
    max_tokens=40,
)
print(answer.choices[0].message.content)
print(f"[{answer.usage.prompt_tokens_details.image_tokens} tokens are the picture's]")
