class Handler:
    def __init__(self, config):
        pass

    def handle_batch(self, payload):
        pass
