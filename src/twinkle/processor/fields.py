"""The fields of an input: their padding, how they are joined, and which of them a batch keeps."""

__all__ = ["MODEL_FIELDS", "MULTIMODAL_FIELDS", "PADDING", "SEQUENCE_FIELDS"]

# Fields with one entry for each token, and the value that pads them. Position −1 marks padding.
PADDING: dict[str, int] = {
    "input_ids": 0,
    "labels": -100,
    "attention_mask": 0,
    "position_ids": -1,
    "completion_mask": 0,
    "routed_experts": 0,
    "mm_token_type_ids": 0,
    "loss_scale": 0,
}
SEQUENCE_FIELDS = tuple(PADDING)

# Fields that hold all images, videos and sounds of a batch one after another. Their rows are not assigned to sequences.
MULTIMODAL_FIELDS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "input_features",
    "input_features_mask",
    "feature_attention_mask",
    "grid_thws",
)

# Fields that the input processor keeps in a batch. It drops all others (messages, user_data, length …); of a batch with
# images it also keeps mm_token_type_ids, which says where they are.
MODEL_FIELDS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "labels",
        "completion_mask",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "routed_experts",
        *MULTIMODAL_FIELDS,
    }
)
