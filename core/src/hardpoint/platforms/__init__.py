"""Parts that platform plugins share: Linux facts read from files, and a platform over torch's device-generic API.

Nothing here decides which platform is used, and importing it imports no torch.
"""
