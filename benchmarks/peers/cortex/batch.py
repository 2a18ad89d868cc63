from batch_total import total


class Handler:
    def __init__(self, config):
        pass

    def handle_batch(self, payload):
        return total(payload)
