"""XR-Transformer side by side with PECOS, and how near its speed comes to that of the bare encoder."""
