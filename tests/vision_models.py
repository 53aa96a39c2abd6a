"""Tiny random vision-language models with their processors, made on the spot; they need Pillow, and no torchvision."""

from __future__ import annotations

import torch
import transformers as tf
from PIL import Image
from tokenizers import AddedToken

from tests.conftest import LETTERS, make_tokenizer

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}>{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}MARK{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)


def picture(seed: int, width: int = 56, height: int = 28) -> Image.Image:
    """Noise of a given size."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def _without_video(processor_class: type) -> type:
    """Such a processor without its video half, which would want torchvision."""

    def check(self, name, argument):
        return None if name == "video_processor" else super(made, self).check_argument_for_proper_class(name, argument)

    made = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})
    return made


def _tokenizer(mark: str, names: list[str], **tokens):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(name, special=True, normalized=False) for name in names]}
    )
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer, CHAT.replace("MARK", mark)


def _qwen(config_class, model_class, processor_class, vision, patch):
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer, chat = _tokenizer("<|vision_start|><|image_pad|><|vision_end|>", names)
    ids = {f"{n}_token_id": tokenizer.convert_tokens_to_ids(f"<|{n}|>") for n in ("vision_start", "vision_end")}
    ids |= {f"{n}_token_id": tokenizer.convert_tokens_to_ids(f"<|{n}_pad|>") for n in ("image", "video")}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    text = TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope, "head_dim": 4}
    config = config_class(text_config=text, vision_config=vision, **ids)
    edge = 2 * patch
    sizes = {"shortest_edge": edge * edge, "longest_edge": 4 * edge * edge}
    images = tf.Qwen2VLImageProcessorPil(patch_size=patch, size=sizes)
    return model_class(config), _without_video(processor_class)(images, tokenizer, None, chat_template=chat)


def qwen2_5_vl():
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
    vision |= {"fullatt_block_indexes": [1], "patch_size": 14}
    return _qwen(tf.Qwen2_5_VLConfig, tf.Qwen2_5_VLForConditionalGeneration, tf.Qwen2_5_VLProcessor, vision, patch=14)


def qwen3_vl():
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
    vision |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen(tf.Qwen3VLConfig, tf.Qwen3VLForConditionalGeneration, tf.Qwen3VLProcessor, vision, patch=16)


def gemma3():
    tokens = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    tokenizer, chat = _tokenizer("<boi>", list(tokens.values()), **tokens)
    config = tf.Gemma3Config(
        text_config=TEXT | {"vocab_size": len(tokenizer), "head_dim": 4, "query_pre_attn_scalar": 4},
        vision_config=TOWER | {"image_size": 28, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    images = tf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = tf.Gemma3Processor(images, tokenizer, chat_template=chat, image_seq_length=4)
    return tf.Gemma3ForConditionalGeneration(config), processor


def smolvlm():
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer, chat = _tokenizer("<image>", names)
    config = tf.SmolVLMConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "model_type": "llama"},
        vision_config=TOWER | {"image_size": 28, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    images = tf.Idefics3ImageProcessorPil(
        size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, do_image_splitting=False
    )
    # SmolVLM's own processor wants two more packages for its videos; for images it is this one.
    processor = tf.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=chat)
    return tf.SmolVLMForConditionalGeneration(config), processor


FAMILIES = {"qwen2.5-vl": qwen2_5_vl, "qwen3-vl": qwen3_vl, "gemma3": gemma3, "smolvlm": smolvlm}
PLACE = {
    "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<boi>",
    "smolvlm": "<image>",
}
"""What stands for an image in a prompt that is text."""


def make(family: str):
    """A model and its processor, with weights large enough that an image matters."""
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.5 if "embed_tokens" in name else parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    assert len(processor.tokenizer) > len(LETTERS)
    return model.float(), processor
