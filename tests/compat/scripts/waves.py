"""A pretrained encoder with a CTC head, in the manner of SpeechBrain's recipes with wav2vec 2.0."""

import sys

import torch
from hyperpyyaml import load_hyperpyyaml

import sbkit as sb


class ASR(sb.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, wav_lens = batch.sig
        wavs, wav_lens = wavs.to(self.device), wav_lens.to(self.device)
        feats = self.modules.wav2vec2(wavs, wav_lens)
        x = self.modules.enc(feats)
        p_tokens = None
        logits = self.modules.ctc_lin(x)
        if hasattr(self.hparams, "upsampling") and self.hparams.upsampling:
            logits = logits.view(logits.shape[0], -1, self.hparams.output_neurons)
        p_ctc = self.hparams.log_softmax(logits)
        if stage == sb.Stage.VALID:
            p_tokens = sb.decoders.ctc_greedy_decode(p_ctc, wav_lens, blank_id=self.hparams.blank_index)
        elif stage == sb.Stage.TEST:
            p_tokens = test_searcher(p_ctc, wav_lens)
            p_tokens = [hyps[0].text for hyps in p_tokens]
        return p_ctc, wav_lens, p_tokens

    def compute_objectives(self, predictions, batch, stage):
        p_ctc, wav_lens, predicted = predictions
        chars, char_lens = batch.char_encoded
        loss = self.hparams.ctc_cost(p_ctc, chars, wav_lens, char_lens)
        if stage == sb.Stage.TEST:
            self.texts += predicted
        return loss

    def on_stage_start(self, stage, epoch):
        self.texts = []

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == sb.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])

    def init_optimizers(self):
        self.wav2vec_optimizer = self.hparams.wav2vec_opt_class(self.modules.wav2vec2.parameters())
        self.model_optimizer = self.hparams.model_opt_class(self.hparams.model.parameters())
        self.optimizers_dict = {"wav2vec": self.wav2vec_optimizer, "model": self.model_optimizer}
        self.checkpointer.add_recoverable("wav2vec_opt", self.wav2vec_optimizer)
        self.checkpointer.add_recoverable("modelopt", self.model_optimizer)


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(experiment_directory=hparams["output_folder"], hyperparams_to_save=hparams_file,
                                   overrides=overrides)
    datasets = [sb.dataio.dataset.DynamicItemDataset.from_csv(csv_path=f"{hparams['data_folder']}/{name}.csv")
                for name in ("train", "dev", "test")]
    label_encoder = sb.dataio.encoder.CTCTextEncoder()

    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio_pipeline(wav):
        return sb.dataio.dataio.read_audio(wav)

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("wrd", "char_list", "char_encoded")
    def text_pipeline(wrd):
        yield wrd
        char_list = list(wrd)
        yield char_list
        yield torch.LongTensor(label_encoder.encode_sequence(char_list))

    sb.dataio.dataset.add_dynamic_item(datasets, audio_pipeline)
    sb.dataio.dataset.add_dynamic_item(datasets, text_pipeline)
    label_encoder.load_or_create(path=hparams["save_folder"] + "/label_encoder.txt", from_didatasets=[datasets[0]],
                                 output_key="char_list", sequence_input=True,
                                 special_labels={"blank_label": hparams["blank_index"]})
    sb.dataio.dataset.set_output_keys(datasets, ["id", "sig", "wrd", "char_encoded"])
    asr_brain = ASR(modules=hparams["modules"], hparams=hparams, run_opts=run_opts,
                    checkpointer=hparams["checkpointer"])
    asr_brain.tokenizer = label_encoder
    vocab_list = [label_encoder.ind2lab[x] for x in range(len(label_encoder.ind2lab))]
    test_searcher = hparams["test_beam_search"]
    test_searcher = sb.decoders.ctc.CTCBeamSearcher(**test_searcher, vocab_list=vocab_list)
    asr_brain.fit(asr_brain.hparams.epoch_counter, datasets[0], datasets[1], train_loader_kwargs={"batch_size": 4},
                  valid_loader_kwargs={"batch_size": 4})
    asr_brain.evaluate(datasets[2], min_key="loss", test_loader_kwargs={"batch_size": 4})
