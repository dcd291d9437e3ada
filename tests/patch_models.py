"""Small models of the real classes of transformers, with random weights, and a batch for each."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

P = {"attn_implementation": "eager"}  # its dropout is torch.nn.functional.dropout, which the tests replace


def ids():
    return torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(3))


def bart(**kwargs):
    sizes = {
        "d_model": 16,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    config = transformers.BartConfig(**sizes, **heads, **{"activation_dropout": 0.2, **kwargs}, **P)
    return transformers.BartForConditionalGeneration(config), {"input_ids": ids(), "labels": ids()}


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=64, num_mel_bins=4, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, d_model=16, max_source_positions=8,
        max_target_positions=16, activation_dropout=0.2, dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, **P,
    )  # fmt: skip
    features = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))
    return transformers.WhisperForConditionalGeneration(config), {"input_features": features, "labels": ids()}


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, activation_dropout=0.2, hidden_dropout=0.1, mask_time_prob=0.0, layerdrop=0.0,
        apply_spec_augment=False, **P,
    )  # fmt: skip
    wave = torch.randn(2, 200, generator=torch.Generator().manual_seed(3))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": wave, "labels": ids() % 30 + 1}


def t5(**kwargs):
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **kwargs, **P,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids()}


def gpt2(**kwargs):
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(
        **sizes, **{"resid_pdrop": 0.2, "bos_token_id": 1, "eos_token_id": 1, **kwargs, **P}
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids(), "labels": ids()}


def detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=5, activation_dropout=0.2,
        dropout=0.1, **P,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return transformers.DetrForObjectDetection(config), {"pixel_values": pixels}


def bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **sizes, **P)
    return transformers.BertForSequenceClassification(config), {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.1, **sizes, **P)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


MODELS = {f.__name__: f for f in (bart, whisper, wav2vec2, t5, gpt2, detr, bert, vit)}
