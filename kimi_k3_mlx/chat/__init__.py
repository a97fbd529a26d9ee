"""K3's chat format: conversations in, pieces of text or token ids out.

`pieces` knows the markup, `render` a conversation, `encode` a tokenizer. Ids are made piece by
piece, so that only the renderer can place a control token: markup that somebody pasted into a
message stays text. `chat_template.jinja` says the same for programs that know only templates.
"""

from kimi_k3_mlx.chat.encode import PieceEncoder, chat_text, encode_chat, marker_ids
from kimi_k3_mlx.chat.pieces import ROLES, Piece
from kimi_k3_mlx.chat.render import EFFORTS, Picture, chat_pieces, render

__all__ = [
    "EFFORTS", "ROLES", "Picture", "Piece", "PieceEncoder", "chat_pieces", "chat_text",
    "encode_chat", "marker_ids", "render",
]  # fmt: skip
